"""One-token steps of one sequence with the whole layer in five or six kernels.

1. norm, QKV and gate scores
2. rotary embedding, append, attention
3. merge, gate (within 2 where one threadgroup can do all keys)
4. output projection, residual
5. norm, gate and up, GELU
6. down projection, residual

Every launch is prepared once; a step only binds arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from operator import getitem, is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention import attend_in_place
from .cache import FullKVCache, LayerCache, SlidingKVCache
from .custom_kernels.backend import backend_key, backend_name, suspended
from .custom_kernels.decode_attention import Shape, bind_decode_attention, can_decode, split_count
from .custom_kernels.decode_linear import (
    Bound,
    Weight,
    bind_linear_add,
    bind_norm_geglu,
    bind_norm_qkv,
    can_linear_add,
    can_norm_geglu,
    can_norm_qkv,
)
from .custom_kernels.rope import rope_table
from .fusions import is_on


@dataclass(frozen=True)
class _Layer:
    """Prepared launches of one layer."""

    qkv: Bound
    shape: Shape
    turns: mx.array
    out: Bound
    geglu: Bound
    down: Bound


def weight_of(layer: nn.Module) -> Weight | None:
    """A linear layer's matrix, if the kernels read it: plain or affine in 4 or 8 bits, no bias, adapter."""
    if "bias" in layer:
        return None
    if type(layer) is nn.Linear:
        return Weight(layer.weight)
    if type(layer) is nn.QuantizedLinear and layer.mode == "affine" and layer.bits in (4, 8):
        return Weight(layer.weight, layer.scales, layer.biases, layer.bits, layer.group_size)
    return None


class FusedDecoder:
    """The layers of a `SparkModel`, prepared for fused steps.

    Attributes:
        usable: whether the formats of the layers and this machine allow it.
    """

    def __init__(self, model: nn.Module, dtype: mx.Dtype) -> None:
        self._prepared_for = backend_key(), suspended()
        self._watched: list[tuple[Any, Any]] = [(model.layers, i) for i in range(len(model.layers))]
        self._watched += [
            (module, name)
            for _, module in model.named_modules()
            for name, value in module.items()
            if isinstance(value, mx.array | nn.Module)
        ]
        self._seen = list(starmap(getitem, self._watched))
        self._layers = [prepared for layer in model.layers if (prepared := _prepare(layer, dtype))]
        self._shapes = list(dict.fromkeys(layer.shape for layer in self._layers))
        self._turns = [next(x.turns for x in self._layers if x.shape == shape) for shape in self._shapes]
        self._kinds = [self._shapes.index(layer.shape) for layer in self._layers]
        self.usable = len(self._layers) == len(model.layers)

    def is_current(self) -> bool:
        """Whether backend, modules and arrays are still those that were prepared for."""
        now = backend_key(), suspended()
        return self._prepared_for == now and all(map(is_, starmap(getitem, self._watched), self._seen))

    def __call__(self, x: mx.array, caches: Sequence[LayerCache]) -> mx.array:
        """The residual stream after all layers, with the token in the caches.

        Args:
            x: embedding of the token [1, 1, hidden_size].
            caches: of all layers, each of one sequence.

        Returns:
            fp32 [1, 1, hidden_size].
        """
        residual = x.astype(mx.float32)
        offset = caches[0].offsets[0]
        positions = mx.array([offset], dtype=mx.int32)
        attentions = [
            bind_decode_attention(shape, split_count(offset, shape.window)) for shape in self._shapes
        ]
        tables = [rope_table(positions, 1, turns) for turns in self._turns]
        for layer, kind, cache in zip(self._layers, self._kinds, caches, strict=True):
            qkv, scores = layer.qkv(residual)
            out = attend_in_place(attentions[kind], layer.shape, qkv, scores, positions, tables[kind], cache)
            (residual,) = layer.out(residual, out)
            (activations,) = layer.geglu(residual)
            (residual,) = layer.down(residual, activations)
        return residual


def _prepare(layer: nn.Module, dtype: mx.Dtype) -> _Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_k_v_proj, attention.out_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    weights = [weight for linear in linears if (weight := weight_of(linear))]
    gate_weight = weight_of(attention.g_proj)
    if len(weights) < len(linears) or gate_weight is None or gate_weight.quantised:
        return None
    qkv, out, gate, up, down = weights
    if not (
        can_norm_qkv(dtype, qkv, gate_weight.weight)
        and can_norm_geglu(dtype, gate, up)
        and can_linear_add(dtype, out)
        and can_linear_add(dtype, down)
    ):
        return None
    heads = attention.heads
    shape = heads.shape(dtype, 1, 1)
    if not can_decode(shape):
        return None
    return _Layer(
        qkv=bind_norm_qkv(
            layer.input_layernorm.weight, qkv, gate_weight.weight, eps=layer.input_layernorm.eps
        ),
        shape=shape,
        turns=heads.turns,
        out=bind_linear_add(out, dtype),
        geglu=bind_norm_geglu(
            layer.post_attention_layernorm.weight, gate, up, eps=layer.post_attention_layernorm.eps
        ),
        down=bind_linear_add(down, dtype),
    )


def supports(caches: Sequence[Any]) -> bool:
    """Whether fused steps are on for this backend and possible with these caches."""
    return is_on("fused_linear", backend_name()) and all(
        isinstance(cache, FullKVCache | SlidingKVCache) and len(cache.offsets) == 1 for cache in caches
    )
