"""GELU(gate) * up against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.custom_kernels.geglu import geglu, geglu_reference
from tests.kernels.backends import Backend
from tests.kernels.rounding import DTYPES, assert_rounded_once, random, to_float64, ulp

GeGLU = Callable[..., mx.array]
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


@pytest.fixture
def run(backend: Backend) -> GeGLU:
    return backend.pick(geglu, geglu_reference)


def oracle(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """z (1 + erf(z / sqrt 2)) / 2 * up; erfc keeps the digits that 1 + erf loses for negative z."""
    gelu = [0.5 * z * math.erfc(-z / math.sqrt(2.0)) for z in gate.flatten()]
    return np.array(gelu).reshape(gate.shape) * up


def fp32_error(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """A few fp32 roundings, that of -z^2 / 2 amplified by the exponential; subnormals may be flushed."""
    relative = 1e-6 + 2.5e-7 * np.square(gate)
    return relative * np.abs(oracle(gate, up)) + 2.0**-126 * np.maximum(np.abs(up), 1.0)


def every_bf16() -> mx.array:
    """All 65,536 numbers, infinities and NaNs included."""
    return mx.arange(1 << 16, dtype=mx.uint32).astype(mx.uint16).view(mx.bfloat16)


@pytest.mark.parametrize("concatenated", [False, True])
def test_every_bf16_gate(run: GeGLU, concatenated: bool) -> None:
    gate = every_bf16()
    up = mx.ones_like(gate)
    # Two rows, so that a fused row's width matters.
    rows = [gate.reshape(2, -1), up.reshape(2, -1)]
    actual = run(mx.concatenate(rows, axis=-1)) if concatenated else run(*rows)
    every, out = to_float64(gate), to_float64(actual).flatten()
    np.testing.assert_array_equal(np.isnan(out), np.isnan(every))
    assert out[every == math.inf] == math.inf
    assert out[every == -math.inf] == 0.0

    finite = np.isfinite(every)
    z, actual = every[finite], actual.flatten()[mx.array(np.flatnonzero(finite))]
    assert z.size == 2 * (1 << 15) - 2 * (1 << 7)
    exact = oracle(z, np.ones_like(z))
    assert_rounded_once(actual, exact, mx.bfloat16, fp32_error(z, np.ones_like(z)))
    normal = np.abs(exact) >= 2.0**-126
    error = np.abs(out[finite] - exact)[normal] / ulp(exact[normal], mx.bfloat16)
    print(f"\nbf16 GELU: largest error {error.max():.4f} ulp, at {z[normal][error.argmax()]}")
    assert error.max() <= 0.51
    assert (out[finite] * np.sign(z) >= 0).all()


@dtypes
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (1, 1, 80), (3, 129), (1, 5, 1000)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_random_values(run: GeGLU, dtype: mx.Dtype, shape: tuple[int, ...], scale: float) -> None:
    gate, up = random(shape, dtype, 0, scale), random(shape, dtype, 1)
    z, u = to_float64(gate), to_float64(up)
    assert_rounded_once(run(gate, up), oracle(z, u), dtype, fp32_error(z, u))


@dtypes
def test_halves_of_a_fused_projection(run: GeGLU, dtype: mx.Dtype) -> None:
    """Concatenated in one argument, or as two that are not contiguous."""
    both = random((2, 3, 34), dtype, 2)
    z, u = to_float64(both)[..., :17], to_float64(both)[..., 17:]
    for out in (run(both), run(both[..., :17], both[..., 17:])):
        assert_rounded_once(out, oracle(z, u), dtype, fp32_error(z, u))


@dtypes
def test_large_and_special_values(run: GeGLU, dtype: mx.Dtype) -> None:
    gate = mx.array([math.nan, math.inf, -math.inf, 6e4, -6e4, 0.0]).astype(dtype)
    nan, infinite, *finite = to_float64(run(gate, mx.ones_like(gate)))
    assert math.isnan(nan)
    assert infinite == math.inf
    assert finite == [0.0, to_float64(gate)[3], 0.0, 0.0]


def test_nan_of_up_is_kept(run: GeGLU) -> None:
    (value,) = to_float64(run(mx.ones(1), mx.array([math.nan])))
    assert math.isnan(value)


def test_gradient_of_the_reference() -> None:
    """Training differentiates the reference: both derivatives, finite at every gate."""
    gate = mx.array([-3e4, -30.0, -5.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 5.0, 30.0, 3e4])
    up = mx.full(gate.shape, 1.5)
    by_gate, by_up = mx.grad(lambda g, u: geglu_reference(g, u).sum(), argnums=(0, 1))(gate, up)
    z = to_float64(gate)
    density = np.exp(-0.5 * np.square(z)) / math.sqrt(2.0 * math.pi)
    derivative = 1.5 * (_normal(z) + z * density)
    np.testing.assert_allclose(np.array(by_gate), derivative, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.array(by_up), oracle(z, np.ones_like(z)), rtol=1e-5, atol=1e-30)


def _normal(z: np.ndarray) -> np.ndarray:
    """The normal distribution function."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in z])
