"""Headwise output gate of the attention."""

from __future__ import annotations

import mlx.core as mx

from .backend import Constant, Kernel, fits_grid


def head_gate_reference(x: mx.array, scores: mx.array, *, mode: str) -> mx.array:
    """`head_gate` in mx ops."""
    s = scores.astype(mx.float32)
    gate = mx.sigmoid(s)
    if mode == "silu":
        # s sigmoid(s) tends to 0, where -inf * 0 would be NaN.
        gate = mx.where(gate == 0, 0, s * gate)
    out = (x.transpose(0, 2, 1, 3).astype(mx.float32) * gate[..., None]).astype(x.dtype)
    return out.flatten(-2)


def head_gate(x: mx.array, scores: mx.array, *, mode: str) -> mx.array:
    """out[b, l, h, :] = x[b, h, l, :] a(scores[b, l, h]), a = sigmoid, or a(s) = s sigmoid(s) for `silu`.

    Equation 7 of `model`; fp32 inside, one rounding.

    Args:
        x: attention output [B, H, L, D].
        scores: output of `g_proj` [B, L, H].
        mode: "sigmoid" or "silu".

    Returns:
        [B, L, H * D] in x's dtype.
    """
    if not _supported(x) or not _KERNEL.ready(x.dtype, x.shape[-1], mode, x.shape[1]):
        return head_gate_reference(x, scores, mode=mode)
    return _launch(_KERNEL, x, [scores], mode, {})


def project_gate_reference(
    x: mx.array, hidden: mx.array, weight: mx.array, bias: mx.array | None, *, mode: str
) -> mx.array:
    """`project_gate` in mx ops."""
    # Not a matmul, which some GPUs would do in less than fp32.
    scores = mx.sum(hidden.astype(mx.float32)[..., None, :] * weight.astype(mx.float32), axis=-1)
    if bias is not None:
        scores = scores + bias.astype(mx.float32)
    return head_gate_reference(x, scores, mode=mode)


def project_gate(
    x: mx.array, hidden: mx.array, weight: mx.array, bias: mx.array | None = None, *, mode: str
) -> mx.array:
    """`head_gate` with the scores hidden · weightᵀ + bias computed inside, in fp32.

    Args:
        x: attention output [B, H, L, D].
        hidden: the layer's normed input [B, L, K].
        weight: of `g_proj` [H, K].
        bias: of `g_proj` [H].

    Returns:
        [B, L, H * D] in x's dtype.
    """
    if not _supported(x) or not _PROJECT.ready(
        x.dtype, x.shape[-1], mode, bias is not None, x.shape[1], hidden.shape[-1]
    ):
        return project_gate_reference(x, hidden, weight, bias, mode=mode)
    inputs = [hidden, weight, weight if bias is None else bias]
    return _launch(_PROJECT, x, inputs, mode, {"K": hidden.shape[-1], "HAS_BIAS": bias is not None})


def _supported(x: mx.array) -> bool:
    return x.shape[-1] % 32 == 0 and x.shape[-1] <= 256 and fits_grid(x.shape[0] * x.shape[2])


def _launch(
    kernel: Kernel, x: mx.array, inputs: list[mx.array], mode: str, constants: dict[str, Constant]
) -> mx.array:
    B, H, L, D = x.shape
    return kernel.launch(
        [x, *inputs],
        grid=(D, H, B * L),
        threadgroup=(D, 1, 1),
        constants={"T": x.dtype, "H": H, "D": D, "SILU": mode == "silu", **constants},
        output_shapes=[(B, L, H * D)],
        output_dtypes=[x.dtype],
    )[0]


def _check(
    dtype: mx.Dtype, head_dim: int, mode: str, heads: int = 3
) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    x = mx.random.normal((2, heads, 5, head_dim), key=mx.random.key(0)).astype(dtype)
    scores = mx.linspace(-8, 8, 10 * heads).reshape(2, 5, heads).astype(dtype)
    return (head_gate(x, scores, mode=mode),), (head_gate_reference(x, scores, mode=mode),)


def _check_project(
    dtype: mx.Dtype, head_dim: int, mode: str, has_bias: bool, heads: int = 3, columns: int = 96
) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    x = mx.random.normal((2, heads, 5, head_dim), key=mx.random.key(0)).astype(dtype)
    hidden = mx.random.normal((2, 5, columns), key=mx.random.key(1)).astype(dtype)
    weight = (mx.random.normal((heads, columns), key=mx.random.key(2)) * columns**-0.5).astype(dtype)
    bias = mx.linspace(-0.5, 0.5, heads).astype(dtype) if has_bias else None
    arguments = (x, hidden, weight, bias)
    return (project_gate(*arguments, mode=mode),), (project_gate_reference(*arguments, mode=mode),)


_KERNEL = Kernel("head_gate", inputs=["x", "scores"], outputs=["out"], headers=["gate"], check=_check)
_PROJECT = Kernel(
    "head_gate",
    variant="project_gate",
    inputs=["x", "hidden", "weight", "bias"],
    outputs=["out"],
    headers=["gate"],
    defines=["DOT"],
    check=_check_project,
)
