"""How far a result may lie from its float64 oracle: one rounding, and what fp32 arithmetic adds."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16, "fp32": mx.float32}
# (bits of the significand, exponent of the smallest normal number)
_FORMATS = {mx.bfloat16: (8, -126), mx.float16: (11, -14), mx.float32: (24, -126)}


def to_float64(x: mx.array) -> np.ndarray:
    # Some NaNs are signalling ones.
    with np.errstate(invalid="ignore"):
        return np.array(x.astype(mx.float32)).astype(np.float64)


def random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int, scale: float = 1.0) -> mx.array:
    """N(0, scale), rounded to the dtype."""
    return mx.array(np.random.default_rng(seed).normal(0.0, scale, shape).astype(np.float32)).astype(dtype)


def ulp(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Distance between neighbouring numbers of the dtype at x."""
    bits, smallest = _FORMATS[dtype]
    _, exponent = np.frexp(x)
    return np.ldexp(1.0, np.maximum(exponent - 1, smallest) - bits + 1)


def rounded(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """The nearest numbers of the dtype, ties to even, as float64."""
    step = ulp(x, dtype)
    return np.asarray(np.rint(x / step) * step)


def assert_rounded_once(
    actual: mx.array, exact: np.ndarray, dtype: mx.Dtype, fp32_error: np.ndarray | float
) -> None:
    """The result has the dtype and the oracle's shape, and is the oracle rounded once.

    Args:
        fp32_error: absolute error that the arithmetic before the rounding may have.
    """
    assert actual.dtype == dtype
    assert actual.shape == exact.shape
    error = np.abs(to_float64(actual) - exact)
    allowed = 0.5 * ulp(exact, dtype) + fp32_error
    # A rounding that crosses a power of two is measured by the larger side's step.
    worst = np.unravel_index(np.argmax(error / allowed), error.shape) if error.size else None
    assert worst is None or error[worst] <= 1.0001 * allowed[worst], (
        f"at {tuple(int(i) for i in worst)}: {to_float64(actual)[worst]} for {exact[worst]}, "
        f"{error[worst] / ulp(exact, dtype)[worst]:.2f} ulp away"
    )
