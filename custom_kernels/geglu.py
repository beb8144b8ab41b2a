"""Gated linear unit with the exact (erf) GELU."""

from __future__ import annotations

import mlx.core as mx

from .backend import Kernel, fits_grid, round_up

# erfc(a) = t exp(-a^2 + p(t)) with t = 1 / (1 + a / 2) for a >= 0, relative error below 1.2e-7; highest power
# first (Press et al., Numerical Recipes, 6.2).
_ERFC = (
    0.17087277,
    -0.82215223,
    1.48851587,
    -1.13520398,
    0.27886807,
    -0.18628806,
    0.09678418,
    0.37409196,
    1.00002368,
    -1.26551223,
)


def geglu_reference(gate: mx.array, up: mx.array | None = None) -> mx.array:
    """`geglu` in mx ops."""
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1)
    z = gate.astype(mx.float32)
    a = mx.abs(z) * 0.5**0.5
    t = 1.0 / (1.0 + 0.5 * a)
    p = mx.full((), _ERFC[0])
    for coefficient in _ERFC[1:]:
        p = p * t + coefficient
    # Bounded, so that gate = -inf gives 0 and no NaN.
    tail = t * mx.exp(p - mx.minimum(a, 1e4) ** 2)
    negative = z < 0
    gelu = mx.where(negative, 0.5 * mx.where(negative, mx.maximum(z, -1e4), 0) * tail, z * (1.0 - 0.5 * tail))
    return (gelu * up.astype(mx.float32)).astype(gate.dtype)


def geglu(gate: mx.array, up: mx.array | None = None) -> mx.array:
    """GELU(gate) * up with GELU(z) = z (1 + erf(z / sqrt 2)) / 2 (equation 9 of `model`).

    Computed as z erfc(-z / sqrt 2) / 2, which keeps its relative accuracy for negative z; fp32 inside, one
    rounding.

    Args:
        gate, up: [..., I], one dtype; or gate = [gate | up] concatenated, [..., 2 I], and no up.

    Returns:
        [..., I] in gate's dtype.
    """
    concatenated = up is None
    size = gate.shape[-1] // (2 if concatenated else 1)
    rows = gate.size // gate.shape[-1]
    if not fits_grid(rows) or not _KERNEL.ready(gate.dtype, concatenated, size):
        return geglu_reference(gate, up)
    return _KERNEL.launch(
        [gate, gate if up is None else up],
        grid=(round_up(size, 256), rows, 1),
        threadgroup=(256, 1, 1),
        constants={"T": gate.dtype, "I": size, "CONCATENATED": concatenated},
        output_shapes=[(*gate.shape[:-1], size)],
        output_dtypes=[gate.dtype],
    )[0]


def _check(
    dtype: mx.Dtype, concatenated: bool, size: int = 100
) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    gate = mx.linspace(-8, 8, 3 * size).reshape(3, size).astype(dtype)
    up = gate[::-1] + 1
    inputs = (mx.concatenate([gate, up], axis=-1),) if concatenated else (gate, up)
    return (geglu(*inputs),), (geglu_reference(*inputs),)


_KERNEL = Kernel("geglu", inputs=["gate", "up"], outputs=["out"], headers=["gelu"], check=_check)
