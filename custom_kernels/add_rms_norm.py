"""Residual addition and RMSNorm, with the residual stream in fp32."""

from __future__ import annotations

import mlx.core as mx

from .backend import Kernel, round_up


def add_rms_norm_reference(
    residual: mx.array, delta: mx.array | None, weight: mx.array, *, eps: float
) -> tuple[mx.array, mx.array]:
    """`add_rms_norm` in mx ops."""
    h = residual if delta is None else residual + delta.astype(mx.float32)
    x = mx.fast.rms_norm(h, weight.astype(mx.float32), eps)
    return h, x.astype(weight.dtype)


def add_rms_norm(
    residual: mx.array, delta: mx.array | None, weight: mx.array, *, eps: float
) -> tuple[mx.array, mx.array]:
    """h = residual + delta and x = weight * h * rsqrt(mean(h^2) + eps) (equations 2 and 8 of `model`).

    Both in fp32; x is rounded once, to the dtype of `weight`.

    Args:
        residual: fp32 [..., H].
        delta: output of the last sublayer [..., H], or None to only normalise.
        weight: [H]; its dtype is that of the normed activations.

    Returns:
        (h fp32 [..., H], x [..., H] in weight's dtype).
    """
    if not _KERNEL.ready(weight.dtype, None if delta is None else delta.dtype, residual.shape[-1]):
        return add_rms_norm_reference(residual, delta, weight, eps=eps)
    size = residual.shape[-1]
    # Four elements a thread keep a decode step's single row within one wave of loads.
    threads = min(1024, round_up(size // 4, 32))
    h, x = _KERNEL.launch(
        [residual, residual if delta is None else delta, weight],
        grid=(threads * (residual.size // size), 1, 1),
        threadgroup=(threads, 1, 1),
        constants={
            "T": weight.dtype,
            "H": size,
            "THREADS": threads,
            "HAS_DELTA": delta is not None,
            "EPS": eps,
        },
        output_shapes=[residual.shape, residual.shape],
        output_dtypes=[mx.float32, weight.dtype],
    )
    return h, x


def _check(
    dtype: mx.Dtype, delta_dtype: mx.Dtype | None, size: int = 160
) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    residual = mx.random.normal((3, size), key=mx.random.key(0))
    delta = None if delta_dtype is None else residual[::-1].astype(delta_dtype)
    weight = (1 + mx.arange(size) / size).astype(dtype)
    arguments = (residual, delta, weight)
    return add_rms_norm(*arguments, eps=1e-6), add_rms_norm_reference(*arguments, eps=1e-6)


_KERNEL = Kernel("add_rms_norm", inputs=["residual", "delta", "weight"], outputs=["h", "x"], check=_check)
