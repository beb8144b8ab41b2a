"""Rows of a KV cache rotated and in four bits a value ("turbo"), in mx ops.

A row x of D values becomes y = R x with R = H diag(signs) / sqrt(D): H is a Walsh-Hadamard matrix, the signs
are fixed and random, so R is orthogonal and its elements are +-1 / sqrt(D). Every element of y is a sum over
all of x, nearly Gaussian whatever x is, and an outlying channel is spread over the row. So one set of levels
serves all rows, and only a scale is stored: that which gives back the row's norm. Inner products with queries
are those of the rotated rows.

Sources: rotations against outliers, QuaRot (arXiv:2404.00456); a random rotation, then the best scalar
quantiser, TurboQuant (arXiv:2504.19874); the levels of least squared error for a Gaussian, Lloyd (1982) and
Max (1960).
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

BITS = 4
# (bits, group size) as of other formats; there are no groups.
TURBO = (BITS, 0)
# Of rows that can be stored.
HEAD_DIMS = (32, 64, 128, 256)
# Levels of a Gaussian of deviation 46.66, to a byte's precision: level t is at LEVELS[t] - MIDDLE.
LEVELS = (133, 146, 158, 171, 186, 203, 224, 255)
MIDDLE = 127.5
STEPS = 127.5 / 2.7326


def signs(head_dim: int) -> np.ndarray:
    """The fixed random signs, float32 [D]: the top bit of a hash of the index."""
    hashes = np.arange(head_dim, dtype=np.uint32) * np.uint32(0x9E3779B1)
    hashes = (hashes ^ (hashes >> np.uint32(15))) * np.uint32(0x85EBCA77)
    return np.where(hashes >> np.uint32(31), -1, 1).astype(np.float32)


@cache
def rotation(head_dim: int) -> mx.array:
    """R, float32 [D, D]: rows x become x @ R.T, and y become y @ R."""
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < head_dim:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return mx.array(hadamard * signs(head_dim) / np.sqrt(np.float32(head_dim)))


def turbo_quantize(x: mx.array) -> tuple[mx.array, mx.array]:
    """Rows [..., D] as codes and scales.

    Returns:
        codes: uint32 [..., D / 8]; code i of 4 bits in word i / 8, low bits first: the level's index, plus 8
            for a negative value.
        scales: [..., 1] in the dtype of x.
    """
    D = x.shape[-1]
    y = x.astype(mx.float32) @ rotation(D).T
    squares = mx.sum(y * y, axis=-1, keepdims=True)
    deviation = mx.sqrt(squares / D)
    sizes = mx.abs(y) * mx.where(squares > 0, STEPS / mx.maximum(deviation, 1e-30), 0)
    levels = mx.array(LEVELS, mx.float32) - MIDDLE
    indices = sum((sizes > (levels[t] + levels[t + 1]) / 2).astype(mx.uint32) for t in range(7))
    found = levels[indices]
    scales = mx.sqrt(squares / mx.sum(found * found, axis=-1, keepdims=True)).astype(x.dtype)
    codes = (indices + 8 * (y < 0).astype(mx.uint32)).reshape(*x.shape[:-1], D // 8, 8)
    words = mx.sum(codes << mx.arange(0, 32, 4, dtype=mx.uint32), axis=-1)
    return words.astype(mx.uint32), scales


def turbo_dequantize(codes: mx.array, scales: mx.array, *, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The rows that are stored [..., D].

    Args:
        dtype: of the result, and of all on the way: no intermediate result is larger.
    """
    y = _levels(codes, scales.astype(dtype))
    return y @ rotation(y.shape[-1]).astype(dtype)


@mx.compile
def _levels(codes: mx.array, scales: mx.array) -> mx.array:
    """Elementwise and in few steps, so MLX makes it one kernel: a gather would have its indices in memory."""
    codes = codes[..., None] >> mx.arange(0, 32, 4, dtype=mx.uint32)
    low, high = (mx.array(sum(LEVELS[4 * i + t] << 8 * t for t in range(4)), mx.uint32) for i in (0, 1))
    byte = (mx.where(codes & 4, high, low) >> ((codes & 3) << 3)) & 255
    levels = mx.where(codes & 8, MIDDLE - byte, byte - MIDDLE).astype(scales.dtype)
    return levels.reshape(*codes.shape[:-2], -1) * scales
