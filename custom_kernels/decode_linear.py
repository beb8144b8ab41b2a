"""Linear layers of a decode step of one token, with the norm, activation and residual addition inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .backend import Check, Constant, Kernel, backend_name
from .geglu import geglu_reference

Bound = Callable[..., list[mx.array]]

# (kernel, bits) -> rows of a simdgroup, simdgroups that share a row (one after a norm), simdgroups of a
# threadgroup, steps whose weights are loaded ahead.
_TUNING = {
    ("norm_qkv", 16): (1, 1, 16, 10),
    ("norm_qkv", 8): (1, 1, 16, 5),
    ("norm_qkv", 4): (1, 1, 16, 5),
    ("norm_geglu", 16): (1, 1, 16, 10),
    ("norm_geglu", 8): (1, 1, 16, 5),
    ("norm_geglu", 4): (1, 1, 16, 5),
    ("linear_add", 16): (4, 4, 8, 5),
    ("linear_add", 8): (2, 4, 8, 5),
    ("linear_add", 4): (2, 4, 8, 5),
}
# Threadgroups after a norm, which each of them computes for itself: on CUDA no more than an H200 has
# multiprocessors. How many are best on Metal has not been measured.
_MOST_NORMS = {"metal": 1 << 30, "cuda": 132}
# The norm's result is staged in threadgroup memory, of which Metal has 32 KB: whole steps of a simdgroup.
_MOST_NORMED = 7680


@dataclass(frozen=True)
class Weight:
    """A linear layer's matrix: plain, or in MLX's affine quantisation.

    Attributes:
        weight: [N, K], or uint32 [N, K * bits / 32].
        scales, biases: [N, K / group_size], when quantised.
        bits: 4 or 8, or 16 for a plain matrix of any dtype.
        group_size: columns of one scale; 0 for a plain matrix.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 16
    group_size: int = 0

    @property
    def quantised(self) -> bool:
        return self.scales is not None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[1] * (32 // self.bits if self.scales is not None else 1)

    @property
    def arrays(self) -> list[mx.array]:
        """The buffers, as the kernels take them."""
        if self.scales is None or self.biases is None:
            return [self.weight]
        return [self.weight, self.scales, self.biases]

    def apply(self, x: mx.array) -> mx.array:
        """x Wᵀ in fp32."""
        weight = self.weight
        if self.scales is not None and self.biases is not None:
            scales, biases = self.scales.astype(mx.float32), self.biases.astype(mx.float32)
            weight = mx.dequantize(weight, scales, biases, group_size=self.group_size, bits=self.bits)
        # Not a matmul, which some GPUs would do in less than fp32.
        return mx.sum(x.astype(mx.float32)[..., None, :] * weight.astype(mx.float32), axis=-1)


def _norm(residual: mx.array, norm_weight: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(residual, norm_weight.astype(mx.float32), eps)


def norm_qkv_reference(
    residual: mx.array, norm_weight: mx.array, weight: Weight, gate_weight: mx.array, *, eps: float
) -> tuple[mx.array, mx.array]:
    """`norm_qkv` in mx ops."""
    x = _norm(residual, norm_weight, eps)
    dtype = gate_weight.dtype
    return weight.apply(x).astype(dtype), Weight(gate_weight).apply(x).astype(dtype)


def norm_qkv(
    residual: mx.array, norm_weight: mx.array, weight: Weight, gate_weight: mx.array, *, eps: float
) -> tuple[mx.array, mx.array]:
    """RMSNorm, then the QKV projection and the gate's scores (equations 2 and 3 of `model`).

    The normed activations stay fp32; the results are rounded once.

    Args:
        residual: fp32 [1, 1, K].
        norm_weight: [K].
        weight: `q_k_v_proj`, N rows.
        gate_weight: `g_proj` [H, K], plain.

    Returns:
        ([1, 1, N], [1, 1, H]) in gate_weight's dtype.
    """
    qkv, scores = bind_norm_qkv(norm_weight, weight, gate_weight, eps=eps)(residual)
    return qkv, scores


def bind_norm_qkv(norm_weight: mx.array, weight: Weight, gate_weight: mx.array, *, eps: float) -> Bound:
    """`norm_qkv` as a function of the residual, for many calls."""
    N, H, dtype = weight.rows, gate_weight.shape[0], gate_weight.dtype
    launch = _NORM_QKV[weight.quantised].bind(
        **_geometry(weight, H, "norm_qkv", {"T": dtype, "H": H, "EPS": eps}),
        output_shapes=[(1, 1, N), (1, 1, H)],
        output_dtypes=[dtype, dtype],
    )
    rest = [norm_weight, *weight.arrays, gate_weight]
    return lambda residual: launch(inputs=[residual, *rest])


def norm_geglu_reference(
    residual: mx.array, norm_weight: mx.array, gate: Weight, up: Weight, *, eps: float
) -> mx.array:
    """`norm_geglu` in mx ops."""
    x = _norm(residual, norm_weight, eps)
    return geglu_reference(gate.apply(x), up.apply(x)).astype(norm_weight.dtype)


def norm_geglu(
    residual: mx.array, norm_weight: mx.array, gate: Weight, up: Weight, *, eps: float
) -> mx.array:
    """RMSNorm, then GELU(W_gate x) * W_up x (equations 2 and 9 of `model`), fp32 inside, one rounding.

    Args:
        residual: fp32 [1, 1, K].
        norm_weight: [K].
        gate, up: `gate_proj` and `up_proj`, of one format, I rows each.

    Returns:
        [1, 1, I] in norm_weight's dtype.
    """
    return bind_norm_geglu(norm_weight, gate, up, eps=eps)(residual)[0]


def bind_norm_geglu(norm_weight: mx.array, gate: Weight, up: Weight, *, eps: float) -> Bound:
    """`norm_geglu` as a function of the residual, for many calls."""
    launch = _NORM_GEGLU[gate.quantised].bind(
        **_geometry(gate, 0, "norm_geglu", {"T": norm_weight.dtype, "EPS": eps}),
        output_shapes=[(1, 1, gate.rows)],
        output_dtypes=[norm_weight.dtype],
    )
    rest = [norm_weight, *gate.arrays, *up.arrays]
    return lambda residual: launch(inputs=[residual, *rest])


def linear_add_reference(residual: mx.array, x: mx.array, weight: Weight) -> mx.array:
    """`linear_add` in mx ops."""
    return residual + weight.apply(x)


def linear_add(residual: mx.array, x: mx.array, weight: Weight) -> mx.array:
    """residual + W x in fp32 (equation 8 of `model`).

    Args:
        residual: fp32 [1, 1, N].
        x: [1, 1, K].
        weight: `out_proj` or `down_proj`, N rows.

    Returns:
        fp32 [1, 1, N].
    """
    return bind_linear_add(weight, x.dtype)(residual, x)[0]


def bind_linear_add(weight: Weight, dtype: mx.Dtype) -> Bound:
    """`linear_add` as a function of the residual and x, for many calls; dtype: of x."""
    launch = _LINEAR_ADD[weight.quantised].bind(
        **_geometry(weight, 0, "linear_add", {"T": dtype}),
        output_shapes=[(1, 1, weight.rows)],
        output_dtypes=[mx.float32],
    )
    arrays = weight.arrays
    return lambda residual, x: launch(inputs=[residual, x, *arrays])


def can_norm_qkv(dtype: mx.Dtype, weight: Weight, gate_weight: mx.array) -> bool:
    """Whether `norm_qkv` runs here for layers of this format and shape."""
    return _fits(weight, "norm_qkv") and _NORM_QKV[weight.quantised].ready(
        dtype, weight.bits, weight.group_size, weight.rows, weight.columns, gate_weight.shape[0]
    )


def can_norm_geglu(dtype: mx.Dtype, gate: Weight, up: Weight) -> bool:
    """Whether `norm_geglu` runs here for layers of this format and shape."""
    return (
        (gate.bits, gate.group_size) == (up.bits, up.group_size)
        and _fits(gate, "norm_geglu")
        and _NORM_GEGLU[gate.quantised].ready(dtype, gate.bits, gate.group_size, gate.rows, gate.columns)
    )


def can_linear_add(dtype: mx.Dtype, weight: Weight) -> bool:
    """Whether `linear_add` runs here for a layer of this format and shape."""
    return _fits(weight, "linear_add") and _LINEAR_ADD[weight.quantised].ready(
        dtype, weight.bits, weight.group_size, weight.rows, weight.columns
    )


def _fits(weight: Weight, kernel: str) -> bool:
    if weight.bits not in (4, 8, 16):
        return False
    values = 8 if weight.bits == 16 else 16
    split = _TUNING[kernel, weight.bits][1]
    return (
        weight.columns % (split * values) == 0
        and (kernel == "linear_add" or weight.columns <= _MOST_NORMED)
        and weight.group_size % values == 0
    )


def _geometry(weight: Weight, more_rows: int, kernel: str, constants: dict[str, Constant]) -> dict[str, Any]:
    rows, split, simdgroups, ahead = _TUNING[kernel, weight.bits]
    if weight.bits == 16 and constants["T"] == mx.float32:
        # As many bytes: a thread's registers are what limits it.
        ahead = -(-ahead // 2)
    per_group = simdgroups // split * rows
    groups = -(-weight.rows // per_group) + -(-more_rows // per_group)
    turns = 1
    if kernel != "linear_add":
        turns = -(-groups // _MOST_NORMS["metal" if backend_name() == "metal" else "cuda"])
        groups = -(-groups // turns)
    return {
        "grid": (groups * 32 * simdgroups, 1, 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        "constants": {
            **constants,
            "N": weight.rows,
            "K": weight.columns,
            "BITS": weight.bits,
            "GROUP": max(weight.group_size, 1),
            "ROWS": rows,
            "KSPLIT": split,
            "SIMDS": simdgroups,
            "AHEAD": ahead,
            "TURNS": turns,
        },
    }


def example_weight(dtype: mx.Dtype, bits: int, group_size: int, shape: tuple[int, int], seed: int) -> Weight:
    """A random matrix [N, K] of shape (N, K), for checks."""
    plain = (mx.random.normal(shape, key=mx.random.key(seed)) * shape[1] ** -0.5).astype(dtype)
    if bits == 16:
        return Weight(plain)
    return Weight(*mx.quantize(plain, group_size=group_size, bits=bits), bits=bits, group_size=group_size)


def _norm_inputs(dtype: mx.Dtype, columns: int) -> tuple[mx.array, mx.array]:
    residual = mx.random.normal((1, 1, columns), key=mx.random.key(0)) * 3
    return residual, (1 + mx.arange(columns) / columns).astype(dtype)


Outputs = tuple[tuple[mx.array, ...], tuple[mx.array, ...]]


def _check_norm_qkv(
    dtype: mx.Dtype, bits: int, group_size: int, rows: int = 70, columns: int = 640, heads: int = 5
) -> Outputs:
    weight = example_weight(dtype, bits, group_size, (rows, columns), 1)
    gate_weight = example_weight(dtype, 16, 0, (heads, columns), 2).weight
    arguments = (*_norm_inputs(dtype, columns), weight, gate_weight)
    return norm_qkv(*arguments, eps=1e-6), norm_qkv_reference(*arguments, eps=1e-6)


def _check_norm_geglu(
    dtype: mx.Dtype, bits: int, group_size: int, rows: int = 70, columns: int = 640
) -> Outputs:
    gate, up = (example_weight(dtype, bits, group_size, (rows, columns), seed) for seed in (1, 2))
    arguments = (*_norm_inputs(dtype, columns), gate, up)
    return (norm_geglu(*arguments, eps=1e-6),), (norm_geglu_reference(*arguments, eps=1e-6),)


def _check_linear_add(
    dtype: mx.Dtype, bits: int, group_size: int, rows: int = 70, columns: int = 640
) -> Outputs:
    residual = mx.random.normal((1, 1, rows), key=mx.random.key(3))
    x = _norm_inputs(dtype, columns)[0].astype(dtype)
    arguments = (residual, x, example_weight(dtype, bits, group_size, (rows, columns), 1))
    return (linear_add(*arguments),), (linear_add_reference(*arguments),)


def _kernels(
    variant: str, inputs: list[str], outputs: list[str], defines: list[str], check: Check
) -> dict[bool, Kernel]:
    """The kernel for plain and for quantised weights; (up_)weight stands for all buffers of the format."""
    return {
        quantised: Kernel(
            "decode_linear",
            variant=variant + "_quantised" * quantised,
            inputs=[name for x in inputs for name in (_packed(x) if quantised else [x])],
            outputs=outputs,
            headers=["common", "gelu", "matvec"],
            defines=[*defines, *(["CODES"] if quantised else [])],
            check=check,
        )
        for quantised in (False, True)
    }


def _packed(name: str) -> list[str]:
    if name not in ("weight", "up_weight"):
        return [name]
    return [name, name.replace("weight", "scales"), name.replace("weight", "biases")]


_NORMED = ["residual", "norm_weight"]
_NORM_QKV = _kernels(
    "norm_qkv", [*_NORMED, "weight", "gate_weight"], ["y", "scores"], ["NORM", "GATES"], _check_norm_qkv
)
_NORM_GEGLU = _kernels(
    "norm_geglu", [*_NORMED, "weight", "up_weight"], ["y"], ["NORM", "GEGLU"], _check_norm_geglu
)
_LINEAR_ADD = _kernels("linear_add", ["residual", "input", "weight"], ["y"], ["ADD"], _check_linear_add)
