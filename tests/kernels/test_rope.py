"""Rotary phases against exact integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.custom_kernels.rope import inverse_frequencies, rope_cos_sin, rope_table, rope_turns
from tests.kernels.backends import Backend

Table = Callable[[mx.array, int, mx.array], tuple[mx.array, mx.array, mx.array]]

# (theta, r) of the published layer classes, full then sliding.
PUBLISHED = [(5e6, 64), (1e6, 64), (1e4, 256)]
POSITIONS = [0, 1, 1_000, 32_000, 262_143, 1_048_575]

# Three fp32 roundings of an angle below pi, and that of the result.
TOLERANCE = 6e-7

published = pytest.mark.parametrize(("theta", "dims"), PUBLISHED)


@lru_cache
def pi() -> Fraction:
    """To 320 bits, by Machin's formula: pi / 4 = 4 arctan(1/5) - arctan(1/239)."""
    one = 1 << 340

    def arctan_of_inverse(n: int) -> int:
        term, total, k = one // n, 0, 1
        while term:
            total += term // k if k % 4 == 1 else -(term // k)
            term //= n * n
            k += 2
        return total

    return Fraction(4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239)), one)


def oracle(theta: float, dims: int, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * inv_freq with the fp32 frequencies exact: float64 [positions, dims / 2]."""
    turn = 2 * pi()
    angles = [
        [float((position * Fraction(float(f)) / turn % 1) * turn) for f in inverse_frequencies(theta, dims)]
        for position in positions
    ]
    return np.cos(angles), np.sin(angles)


def distance(
    cos: mx.array | np.ndarray, sin: mx.array | np.ndarray, exact: tuple[np.ndarray, np.ndarray]
) -> float:
    """Largest absolute error of cosines and sines."""
    return max(
        float(np.abs(np.array(actual).astype(np.float64) - wanted).max())
        for actual, wanted in zip((cos, sin), exact, strict=True)
    )


def test_pi() -> None:
    assert float(pi()) == math.pi
    assert abs(pi() - Fraction(884279719003555, 281474976710656)) < Fraction(1, 10**15)
    assert str(int(pi() * 10**50)) == "314159265358979323846264338327950288419716939937510"


@pytest.mark.parametrize(("theta", "dims"), [*PUBLISHED, (10.0, 2), (123456.7, 6)])
def test_frequencies(theta: float, dims: int) -> None:
    """Near theta^(-2j/dims): a few fp32 roundings, that of the exponent amplified by log theta."""
    frequencies = inverse_frequencies(theta, dims)
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (dims // 2,)
    assert frequencies[0] == 1.0
    exact = np.array([theta ** (-2 * j / dims) for j in range(dims // 2)])
    np.testing.assert_allclose(frequencies, exact, rtol=2.0**-24 * (2.5 + math.log(theta)))
    # numpy's own fp32 power may round the other way.
    stepwise = np.float32(1) / np.float32(theta) ** (
        np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    )
    np.testing.assert_array_max_ulp(frequencies, stepwise, maxulp=2)


@published
def test_turns_are_the_nearest_integers(theta: float, dims: int) -> None:
    turns = rope_turns(theta, dims)
    assert turns.dtype == mx.uint64
    assert turns.shape == (dims // 2,)
    integers = [int(turn) for turn in np.array(turns)]
    for turn, frequency in zip(integers, inverse_frequencies(theta, dims), strict=True):
        exact = Fraction(float(frequency)) / (2 * pi()) * 2**64
        assert abs(turn - exact) <= Fraction(1, 2)


@published
def test_distance_to_exact_phases(theta: float, dims: int) -> None:
    """At every position as good as fp32 can be. Beside it: Hugging Face's fp32 products, and mlx's rope."""
    half = dims // 2
    frequencies = inverse_frequencies(theta, dims)
    unit = mx.concatenate([mx.ones((1, 1, 1, half)), mx.zeros((1, 1, 1, half))], axis=-1)
    print(f"\nlargest error of cos and sin, theta {theta:g}, {dims} dimensions")
    print(f"{'position':>10} {'ours':>9} {'HF, fp32':>13} {'mx.fast.rope':>13}")
    for position in POSITIONS:
        exact = oracle(theta, dims, [position])
        ours = distance(*rope_cos_sin(rope_turns(theta, dims), mx.array([position])), exact)
        angles = (np.float32(position) * frequencies).astype(np.float64)
        product = distance(np.cos(angles)[None], np.sin(angles)[None], exact)
        # The unit vectors of the first half turn into (cos, sin).
        turned = mx.fast.rope(unit, dims, traditional=False, base=theta, scale=1.0, offset=position)[0, 0]
        fast = distance(turned[:, :half], turned[:, half:], exact)
        print(f"{position:10} {ours:9.1e} {product:13.1e} {fast:13.1e}")
        assert ours <= TOLERANCE
    # What exact phases are for: the product has lost digits here that attention needs.
    assert product > 1e-3


@published
def test_many_positions(theta: float, dims: int) -> None:
    positions = [int(p) for p in np.random.default_rng(0).integers(0, 1 << 20, 40)]
    cos, sin = rope_cos_sin(rope_turns(theta, dims), mx.array(positions))
    assert cos.dtype == sin.dtype == mx.float32
    assert distance(cos, sin, oracle(theta, dims, positions)) <= TOLERANCE


@pytest.mark.parametrize("shape", [(1,), (5,), (1, 7), (3, 2), (2, 1, 4)])
@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64])
def test_shapes_and_dtypes_of_positions(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    positions = mx.arange(math.prod(shape)).reshape(shape).astype(dtype)
    cos, sin = rope_cos_sin(rope_turns(1e4, 6), positions)
    assert cos.shape == sin.shape == (*shape, 3)
    exact = oracle(1e4, 6, list(range(positions.size)))
    assert distance(cos.reshape(-1, 3), sin.reshape(-1, 3), exact) <= TOLERANCE


def table_reference(positions: mx.array, length: int, turns: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """`rope_table` in mx ops."""
    return positions, *rope_cos_sin(turns, positions[:, None] + mx.arange(length))


def assert_table(run: Table, positions: list[int], length: int, dims: int) -> None:
    starts, cos, sin = run(mx.array(positions, dtype=mx.int32), length, rope_turns(1e4, dims))
    assert starts.tolist()[: len(positions)] == positions
    assert cos.dtype == sin.dtype == mx.float32
    assert cos.shape == sin.shape == (len(positions), length, dims // 2)
    exact = oracle(1e4, dims, [start + i for start in positions for i in range(length)])
    assert distance(cos.reshape(-1, dims // 2), sin.reshape(-1, dims // 2), exact) <= TOLERANCE


@pytest.mark.parametrize("dims", [2, 6, 64, 96, 256])
def test_table(backend: Backend, dims: int) -> None:
    run = backend.pick(rope_table, table_reference)
    assert_table(run, [0], 1, dims)
    assert_table(run, [1_048_575, 0, 2_147_000_000], 1, dims)
    assert_table(run, [511, 1_048_570], 8, dims)


def test_relative_phases_hold_at_a_million() -> None:
    """What attention uses: the phase between two positions, wherever they are."""
    turns = rope_turns(5e6, 64)
    for start in (0, 1_048_000):
        cos, sin = (
            np.array(t).astype(np.float64) for t in rope_cos_sin(turns, mx.array([start, start + 511]))
        )
        relative = cos[1] * cos[0] + sin[1] * sin[0], sin[1] * cos[0] - cos[1] * sin[0]
        assert distance(*relative, tuple(t[0] for t in oracle(5e6, 64, [511]))) <= 1e-6
