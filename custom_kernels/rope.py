"""Rotary phases that are exact at any position.

A position times an fp32 frequency, in fp32, loses a bit of the phase with every doubling of the position: the
cosines are 0.03 off near position 1,048,575. Here a frequency is a number of turns per
position, in 0.64 fixed point; position * turns modulo 2^64 is then the exact phase, whatever the position.
"""

from __future__ import annotations

from fractions import Fraction

import mlx.core as mx
import numpy as np

from .backend import Kernel, round_up

# pi in hexadecimal, 0x3.243F6A88...: pi = _PI / 2**256.
_PI = 0x3_243F6A88_85A308D3_13198A2E_03707344_A4093822_299F31D0_082EFA98_EC4E6C89
_TWO_PI = Fraction(2 * _PI, 1 << 256)

# First positions, cosines and sines.
Table = tuple[mx.array, mx.array, mx.array]
# On CUDA, MLX keeps arrays of up to 8 bytes in memory that it shares with the host. What the host has just
# written is read from there once; the many threadgroups of other kernels read a copy, which is larger.
_FEWEST_STARTS = 4


def inverse_frequencies(theta: float, dims: int) -> np.ndarray:
    """The reference's frequencies theta^(-2j/dims), j = 0 .. dims/2 - 1, each step rounded to fp32.

    Returns:
        fp32 [dims / 2], in radians per position.
    """
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    # Computed in fp64 and rounded once: the same frequencies on every platform's libm.
    powers = np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / powers


def rope_turns(theta: float, dims: int) -> mx.array:
    """Frequencies as turns per position in 0.64 fixed point: round(2^64 * inv_freq / 2 pi).

    Returns:
        uint64 [dims / 2].
    """
    turns = [
        round(Fraction(float(frequency)) / _TWO_PI * (1 << 64))
        for frequency in inverse_frequencies(theta, dims)
    ]
    return mx.array(np.array(turns, dtype=np.uint64))


def rope_cos_sin(turns: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
    """Cosines and sines of the phases of position * inv_freq.

    Args:
        turns: uint64 [r / 2] from `rope_turns`.
        positions: integers >= 0, any shape [...].

    Returns:
        (cos, sin), each fp32 [..., r / 2].
    """
    phase = positions.astype(mx.uint64)[..., None] * turns
    # The upper 32 bits, read as signed, are the phase in [-1/2, 1/2) turns: reduced for sin and cos.
    signed = (phase >> 32).astype(mx.uint32).view(mx.int32)
    angle = signed.astype(mx.float32) * (2 * np.pi / 2**32)
    return mx.cos(angle), mx.sin(angle)


def rope_table(positions: mx.array, length: int, turns: mx.array) -> Table:
    """Cosines and sines for `length` tokens of each sequence.

    Args:
        positions: int32 [B], position of the first token of each sequence.
        turns: uint64 [r / 2] from `rope_turns`.

    Returns:
        (positions, cos, sin): int32 with B or more entries, and twice fp32 [B, length, r / 2].
    """
    dims = 2 * turns.size
    if not _TABLE.ready(dims):
        return positions, *rope_cos_sin(turns, positions[:, None] + mx.arange(length))
    starts = max(positions.size, _FEWEST_STARTS)
    shape = (positions.size, length, dims // 2)
    first, cos, sin = _TABLE.launch(
        [positions, turns],
        grid=(round_up(dims // 2, 32), length, positions.size),
        threadgroup=(32, 1, 1),
        constants={"R": dims, "L": length, "STARTS": starts},
        output_shapes=[(starts,), shape, shape],
        output_dtypes=[mx.int32, mx.float32, mx.float32],
    )
    return first, cos, sin


def _check(dims: int) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    positions, turns = mx.array([3, 1_000_003], dtype=mx.int32), rope_turns(10_000.0, dims)
    starts, *table = rope_table(positions, 2, turns)
    exact = rope_cos_sin(turns, positions[:, None] + mx.arange(2))
    return (starts[: positions.size], *table), (positions, *exact)


_TABLE = Kernel(
    "rope_table",
    inputs=["positions", "turns"],
    outputs=["starts", "cosines", "sines"],
    headers=["phase"],
    check=_check,
)
