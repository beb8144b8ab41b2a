"""Residual addition and RMSNorm against float64."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.custom_kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from tests.kernels.backends import Backend
from tests.kernels.rounding import DTYPES, assert_rounded_once, random, to_float64

AddRMSNorm = Callable[..., tuple[mx.array, mx.array]]
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


@pytest.fixture
def run(backend: Backend) -> AddRMSNorm:
    return backend.pick(add_rms_norm, add_rms_norm_reference)


def oracle(
    residual: np.ndarray, delta: np.ndarray | None, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """h = residual + delta and weight * h / sqrt(mean(h^2) + eps)."""
    h = residual if delta is None else residual + delta
    return h, weight * h / np.sqrt(np.square(h).mean(-1, keepdims=True) + eps)


def assert_added_and_normed(
    run: AddRMSNorm, residual: mx.array, delta: mx.array | None, weight: mx.array, eps: float
) -> None:
    h, x = run(residual, delta, weight, eps=eps)
    wide = None if delta is None else to_float64(delta)
    exact_h, exact_x = oracle(to_float64(residual), wide, to_float64(weight), eps)
    # The sum of two fp32 numbers, correctly rounded, is one number.
    np.testing.assert_array_equal(np.array(h), exact_h.astype(np.float32))
    assert h.dtype == mx.float32
    # The norm of the rounded sum: a cancellation in the addition is no error of the norm.
    _, exact_x = oracle(to_float64(h), None, to_float64(weight), eps)
    assert_rounded_once(x, exact_x, weight.dtype, 1e-6 * np.abs(exact_x))


@dtypes
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 1, 2560), (2, 3, 48), (1, 7, 33), (3, 2, 1025), (1, 2, 4099)]
)
def test_random_values(run: AddRMSNorm, dtype: mx.Dtype, with_delta: bool, shape: tuple[int, ...]) -> None:
    delta = random(shape, dtype, 1) if with_delta else None
    weight = random(shape[-1:], dtype, 2) + mx.array(1.0, dtype)
    assert_added_and_normed(run, random(shape, mx.float32, 0, scale=3.0), delta, weight, 1e-6)


@dtypes
@pytest.mark.parametrize("scale", [1e-4, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_epsilon_and_scales(run: AddRMSNorm, dtype: mx.Dtype, scale: float, eps: float) -> None:
    """Where epsilon matters (small activations) and where it does not."""
    delta = random((2, 3, 96), dtype, 1, scale)
    assert_added_and_normed(run, random((2, 3, 96), mx.float32, 0, scale), delta, mx.ones(96, dtype), eps)


@dtypes
def test_inputs_that_are_not_contiguous(run: AddRMSNorm, dtype: mx.Dtype) -> None:
    residual = random((4, 3, 2, 40), mx.float32, 0).transpose(2, 1, 0, 3)[0]
    delta = random((3, 4, 80), dtype, 1)[..., ::2]
    assert_added_and_normed(run, residual, delta, random((40,), dtype, 2), 1e-6)


def test_small_deltas_are_not_lost(run: AddRMSNorm) -> None:
    """bf16 deltas too small to move a bf16 residual add up in fp32."""
    h, delta = mx.ones((1, 1, 8)), mx.full((1, 1, 8), 2.0**-8, mx.bfloat16)
    for _ in range(256):
        h, _ = run(h, delta, mx.ones(8, mx.bfloat16), eps=1e-6)
    np.testing.assert_array_equal(np.array(h), np.full((1, 1, 8), 2.0, np.float32))


@dtypes
def test_zeros_give_zeros(run: AddRMSNorm, dtype: mx.Dtype) -> None:
    h, x = run(mx.zeros((1, 2, 16)), None, mx.ones(16, dtype), eps=1e-6)
    assert not np.array(h).any()
    assert not to_float64(x).any()
