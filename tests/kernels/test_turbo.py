"""The turbo format against its definition in float64."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.custom_kernels.turbo import HEAD_DIMS, turbo_dequantize, turbo_quantize
from tests.kernels.rounding import random, to_float64, ulp

# Of Lloyd and Max, for a unit Gaussian.
_GAUSSIAN = np.array([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326])


def levels() -> np.ndarray:
    """What the 16 codes stand for: the levels as a byte has them, and the same below 0."""
    positive = np.rint(127.5 + 127.5 * _GAUSSIAN / _GAUSSIAN[-1]) - 127.5
    return np.concatenate([positive, -positive])


def rotation(head_dim: int) -> np.ndarray:
    """H diag(signs) / sqrt(D), element by element: (-1)^popcount(i & j), and the signs from the hash."""
    index = np.arange(head_dim)
    parity = np.array([[(i & j).bit_count() % 2 for j in range(head_dim)] for i in range(head_dim)])
    signs = []
    for d in index.tolist():
        hashed = d * 0x9E3779B1 % 2**32
        hashed = (hashed ^ hashed >> 15) * 0x85EBCA77 % 2**32
        signs.append(-1.0 if hashed >> 31 else 1.0)
    return (1.0 - 2.0 * parity) * np.array(signs) / math.sqrt(head_dim)


def assert_nearest(stored: tuple[mx.array, ...], rows: np.ndarray, error: float) -> None:
    """Codes of the nearest levels and scales that keep the norm, for rows [..., D].

    Args:
        error: that the rows may have before they are stored, of their deviation; codes of values that lie as
            near to the middle between two levels may be either's.
    """
    codes, scales = stored
    D = rows.shape[-1]
    y = rows @ rotation(D).T
    norm = np.sqrt((y * y).sum(-1, keepdims=True))
    scaled = y / norm * math.sqrt(D) * 127.5 / _GAUSSIAN[-1]
    got = (np.array(codes)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    found = levels()[got.reshape(rows.shape)]
    distances = np.abs(scaled[..., None] - levels())
    excess = np.abs(scaled - found) - distances.min(-1)
    assert excess.max() <= 2 * 127.5 / _GAUSSIAN[-1] * (error + 1e-5)
    exact = norm / np.sqrt((found * found).sum(-1, keepdims=True))
    assert np.all(
        np.abs(to_float64(scales) - exact) <= 0.51 * ulp(exact, scales.dtype) + (error + 5e-7) * exact
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_rows_are_stored_as_defined(D: int, dtype: mx.Dtype) -> None:
    rows = random((3, 40, D), dtype, 0) * mx.array([1.0, 1e-3, 50.0]).astype(dtype)[:, None, None]
    stored = turbo_quantize(rows)
    assert [x.shape for x in stored] == [(3, 40, D // 8), (3, 40, 1)]
    assert [x.dtype for x in stored] == [mx.uint32, dtype]
    assert_nearest(stored, to_float64(rows), 0.0)
    got = (np.array(stored[0])[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    rotated = levels()[got.reshape(rows.shape)] * to_float64(stored[1])
    back = to_float64(turbo_dequantize(*stored))
    np.testing.assert_allclose(back, rotated @ rotation(D), atol=1e-5 * np.abs(rotated).max())


def test_rotation_is_orthogonal_and_not_regular() -> None:
    for D in HEAD_DIMS:
        turn = rotation(D)
        np.testing.assert_allclose(turn @ turn.T, np.eye(D), atol=1e-12)
        # A row that is constant or alternates is spread as well as any.
        for row in (np.ones(D), np.tile([1.0, -1.0], D // 2), np.repeat([1.0, -1.0], D // 2)):
            assert np.abs(turn @ row).max() < 4.2 * math.sqrt(np.mean(row * row))


def test_error_beside_affine_groups() -> None:
    """With 4.06 bits for 4.5: as large on Gaussian rows, much smaller if some channels stand out."""
    rows = np.random.default_rng(0).normal(size=(500, 256))
    for factor, most in ((1.0, 1.1), (10.0, 0.7)):
        outlying = rows.copy()
        outlying[:, [3, 77, 130, 201]] *= factor
        x = mx.array(outlying.astype(np.float32))
        affine = mx.dequantize(*mx.quantize(x, 64, 4), 64, 4)
        turbo = turbo_dequantize(*turbo_quantize(x))
        errors = [np.sqrt(np.mean((to_float64(y) - outlying) ** 2)) for y in (turbo, affine)]
        assert errors[0] < most * errors[1]
        norms = np.linalg.norm(to_float64(turbo), axis=-1) / np.linalg.norm(outlying, axis=-1)
        np.testing.assert_allclose(norms, 1.0, rtol=1e-5)


def test_rows_of_zeros() -> None:
    codes, scales = turbo_quantize(mx.zeros((2, 64), mx.bfloat16))
    assert not np.array(codes).any() and not to_float64(scales).any()
    assert not to_float64(turbo_dequantize(codes, scales)).any()
