"""The attention's output gate against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.custom_kernels.head_gate import (
    head_gate,
    head_gate_reference,
    project_gate,
    project_gate_reference,
)
from tests.kernels.backends import Backend
from tests.kernels.rounding import DTYPES, assert_rounded_once, random, to_float64

HeadGate = Callable[..., mx.array]
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
modes = pytest.mark.parametrize("mode", ["sigmoid", "silu"])


@pytest.fixture
def run(backend: Backend) -> HeadGate:
    return backend.pick(head_gate, head_gate_reference)


def oracle(x: np.ndarray, scores: np.ndarray, mode: str) -> np.ndarray:
    """x[b, h, l, :] * a(scores[b, l, h]), heads side by side: [B, L, H * D]."""
    with np.errstate(over="ignore"):
        sigmoid = 1.0 / (1.0 + np.exp(-scores))
    gate = {"sigmoid": sigmoid, "silu": scores * sigmoid}[mode]
    B, H, L, D = x.shape
    out = np.empty((B, L, H * D))
    for h in range(H):
        out[..., h * D : (h + 1) * D] = x[:, h] * gate[..., h, None]
    return out


def assert_gated(run: HeadGate, x: mx.array, scores: mx.array, mode: str) -> None:
    exact = oracle(to_float64(x), to_float64(scores), mode)
    assert_rounded_once(run(x, scores, mode=mode), exact, x.dtype, 1e-6 * np.abs(exact))


@dtypes
@modes
@pytest.mark.parametrize(
    ("B", "H", "L", "D"),
    [(1, 16, 1, 256), (2, 4, 3, 32), (1, 3, 7, 96), (3, 8, 1, 64), (2, 1, 5, 160), (1, 5, 2, 224)],
)
def test_random_values(run: HeadGate, dtype: mx.Dtype, mode: str, B: int, H: int, L: int, D: int) -> None:
    assert_gated(run, random((B, H, L, D), dtype, 0), random((B, L, H), dtype, 1, scale=3.0), mode)


@pytest.mark.fallback
@dtypes
@modes
@pytest.mark.parametrize("D", [1, 33, 320])
def test_widths_without_a_kernel(run: HeadGate, dtype: mx.Dtype, mode: str, D: int) -> None:
    assert_gated(run, random((2, 3, 5, D), dtype, 0), random((2, 5, 3), dtype, 1, scale=3.0), mode)


@dtypes
@modes
def test_inputs_that_are_not_contiguous(run: HeadGate, dtype: mx.Dtype, mode: str) -> None:
    """Positions before heads in memory, scores out of a wider projection."""
    x = random((2, 5, 4, 32), dtype, 2).transpose(0, 2, 1, 3)
    assert_gated(run, x, random((2, 5, 6), dtype, 3)[..., 1:5], mode)


@dtypes
@modes
def test_large_scores(run: HeadGate, dtype: mx.Dtype, mode: str) -> None:
    """Open and shut gates; no exponential overflows into NaN."""
    scores = mx.array([[[40.0, 1e4, -1e4, -200.0, -math.inf]]]).astype(dtype)
    actual = to_float64(run(mx.ones((1, 5, 1, 32), dtype), scores, mode=mode)).reshape(5, 32)
    opened = to_float64(scores)[0, 0, :2] if mode == "silu" else np.ones(2)
    np.testing.assert_array_equal(actual, np.repeat([[*opened, 0.0, 0.0, 0.0]], 32, axis=0).T)


def test_nan_is_kept(run: HeadGate) -> None:
    x, scores = mx.ones((1, 2, 1, 32)), mx.array([[[math.nan, 1.0]]])
    assert np.isnan(to_float64(run(x, scores, mode="sigmoid"))[0, 0]).tolist() == [True] * 32 + [False] * 32


def test_modes_differ(run: HeadGate) -> None:
    x, scores = mx.ones((1, 1, 1, 32)), mx.array([[[2.0]]])
    sigmoid = 1.0 / (1.0 + math.exp(-2.0))
    for mode, gate in (("sigmoid", sigmoid), ("silu", 2.0 * sigmoid)):
        np.testing.assert_allclose(np.array(run(x, scores, mode=mode)), np.full((1, 1, 32), gate), rtol=1e-6)


def assert_projected_and_gated(
    run: HeadGate, x: mx.array, hidden: mx.array, weight: mx.array, bias: mx.array | None, mode: str
) -> None:
    scores = to_float64(hidden) @ to_float64(weight).T + (0.0 if bias is None else to_float64(bias))
    # A sum of K fp32 products moves the scores, and these the gate, by an absolute error.
    error = 1e-5 * np.abs(to_float64(x)).max()
    exact = oracle(to_float64(x), scores, mode)
    assert_rounded_once(run(x, hidden, weight, bias, mode=mode), exact, x.dtype, error)


@dtypes
@modes
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("B", "H", "L", "D", "K"), [(1, 16, 1, 256, 96), (2, 3, 5, 32, 33), (1, 1, 1, 64, 1), (1, 2, 2, 96, 500)]
)
def test_projected_scores(
    backend: Backend, dtype: mx.Dtype, mode: str, with_bias: bool, B: int, H: int, L: int, D: int, K: int
) -> None:
    """The scores are not rounded to the dtype between projection and gate."""
    assert_projected_and_gated(
        backend.pick(project_gate, project_gate_reference),
        random((B, H, L, D), dtype, 0),
        random((B, L, K), dtype, 1),
        random((H, K), dtype, 2, 0.2),
        random((H,), dtype, 3) if with_bias else None,
        mode,
    )
