"""Steps of decoding: a few tokens on the route FUSED in all layers, traced once and then replayed.

The step of one token of one sequence has five or six kernels a layer, if its linear layers allow:

1. norm, QKV and gate scores
2. rotary embedding, append, attention
3. merge, gate (within 2 where one threadgroup can do all keys)
4. output projection, residual
5. norm, gate and up, GELU
6. down projection, residual
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, starmap
from operator import getitem, is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention import FUSED, Step, fused_shape
from .cache import LayerCache, for_batch
from .cache.storage import KV
from .custom_kernels.add_rms_norm import add_rms_norm
from .custom_kernels.backend import backend_key, backend_name, is_forced, suspended
from .custom_kernels.decode_attention import MAX_TOKENS, Shape, bind_decode_attention, split_count
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

# (embedded tokens, positions, what the first write comes after, buffers of each layer) -> normed output
StepFunction = Callable[[mx.array, mx.array, mx.array, list[KV]], mx.array]


# Modules, beside this package's own, whose results depend on nothing but their arrays.
_TRACEABLE = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, nn.RMSNorm)
# Kinds of steps, and functions of a kind, that are kept.
_MOST_KEPT = 16
_serials = count()


@dataclass(frozen=True)
class _Layer:
    """Prepared launches of one layer for one token."""

    qkv: Bound
    out: Bound
    geglu: Bound
    down: Bound


@dataclass
class _Kind:
    """Steps of one batch size, number of tokens and format of the caches.

    Attributes:
        shapes: of the attention, each once.
        shape_of: index of each layer's shape.
        firsts: the first layer of each shape.
        turns: rotary frequencies for each shape.
        functions: by splits and capacities of each shape.
    """

    shapes: list[Shape]
    shape_of: list[int]
    firsts: list[int]
    turns: list[mx.array]
    functions: dict[tuple[tuple[int, ...], tuple[int, ...]], StepFunction] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rows:
    """Stands for a cache while a step is traced: the cache itself is asked before and told after it."""

    buffers: KV
    last: mx.array

    def reserve(self, *_: Any, **__: Any) -> KV:
        return self.buffers

    def commit(self, *_: Any) -> None:
        pass


def weight_of(layer: nn.Module) -> Weight | None:
    """A linear layer's matrix, if the kernels read it: plain or affine in 4 or 8 bits, no bias, adapter."""
    if "bias" in layer:
        return None
    if type(layer) is nn.Linear:
        return Weight(layer.weight)
    if type(layer) is nn.QuantizedLinear and layer.mode == "affine" and layer.bits in (4, 8):
        return Weight(layer.weight, layer.scales, layer.biases, layer.bits, layer.group_size)
    return None


class Decoder:
    """Steps of a `SparkModel`, prepared as long as nothing of it changes.

    A module or array that is replaced is noticed; an array that is changed in place (`weight *= 2`) is not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prepared_for = backend_key(), suspended()
        self._parts = [module for _, module in model.named_modules()]
        self._sizes = list(map(len, self._parts))
        self._layers = model.layers
        self._watched: list[tuple[Any, Any]] = [(model, "layers")]
        self._watched += [(self._layers, i) for i in range(len(self._layers))]
        self._watched += [
            (module, name)
            for module in self._parts
            for name, value in module.items()
            if isinstance(value, mx.array | nn.Module)
        ]
        self._seen = list(starmap(getitem, self._watched))
        self._modules = list(model.layers)
        self._norm = model.norm
        self._kinds: dict[tuple[Any, ...], _Kind | None] = {}
        dtypes = {layer.qkv_dtype() for layer in self._modules}
        # One for all layers, or there are no steps.
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None
        # The launches of one token, if all layers have them.
        self._fused: list[_Layer] = []
        if self._dtype is not None and is_on("fused_linear", backend_name()):
            prepared = [fused for layer in self._modules if (fused := _prepare(layer, self._dtype))]
            self._fused = prepared if len(prepared) == len(self._modules) else []
        # A trace keeps the numbers that it was made with, such as an adapter's scale.
        self._compiles = is_on("compiled_step", backend_name()) and not is_forced()
        self._compiles = self._compiles and all(
            type(part) in _TRACEABLE or type(part).__module__.startswith(f"{__package__}.")
            for part in self._parts
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model prepares its own."""
        return type(None), ()

    def is_current(self) -> bool:
        """Whether backend, modules and arrays are still those that were prepared for."""
        return (
            self._prepared_for == (backend_key(), suspended())
            and list(map(len, self._parts)) == self._sizes
            and len(self._layers) == len(self._modules)
            and all(map(is_, starmap(getitem, self._watched), self._seen))
        )

    def __call__(self, x: mx.array, caches: Sequence[LayerCache]) -> mx.array | None:
        """The layers' normed output, with the tokens in the caches; None if some layer goes another way.

        Args:
            x: embedded tokens [B, L, hidden_size].
            caches: of all layers.

        Returns:
            [B, L, hidden_size] in the dtype of the weights.
        """
        kind = self._kind(x, caches)
        if kind is None:
            return None
        batch, length, _ = x.shape
        offsets = for_batch(caches[0].offsets, batch)
        longest = max(offsets)
        after = _last_of(caches)
        buffers = []
        for cache, index in zip(caches, kind.shape_of, strict=True):
            shape = kind.shapes[index]
            rows = shape.batch, shape.n_kv_heads, shape.head_dim
            buffers.append(cache.reserve(length, shape=rows, dtype=shape.dtype))
        splits = tuple(split_count(longest, shape) for shape in kind.shapes)
        function = self._function(kind, splits, tuple(caches[i].capacity for i in kind.firsts))
        out = function(x, mx.array(offsets, dtype=mx.int32), x if after is None else after, buffers)
        for cache in caches:
            # What waits for the last layer waits for all.
            cache.commit(length, out)
        return out

    def _kind(self, x: mx.array, caches: Sequence[LayerCache]) -> _Kind | None:
        batch, length, _ = x.shape
        if length > MAX_TOKENS or self._dtype is None:
            return None
        padded = min(caches[0].valid(length)) < length
        key = batch, length, padded, tuple((type(cache), cache.kv_format, cache.slack) for cache in caches)
        if key not in self._kinds:
            shapes = []
            for module, cache in zip(self._modules, caches, strict=True):
                shape = fused_shape(module.self_attn.heads, cache, batch, length, self._dtype)
                if shape is None:
                    break
                shapes.append(shape)
            kind = self._new_kind(shapes) if len(shapes) == len(self._modules) else None
            _put(self._kinds, key, kind)
        return self._kinds[key]

    def _new_kind(self, shapes: list[Shape]) -> _Kind:
        distinct = list(dict.fromkeys(shapes))
        shape_of = [distinct.index(shape) for shape in shapes]
        firsts = [shape_of.index(i) for i in range(len(distinct))]
        return _Kind(distinct, shape_of, firsts, [self._modules[i].self_attn.heads.turns for i in firsts])

    def _function(self, kind: _Kind, splits: tuple[int, ...], capacities: tuple[int, ...]) -> StepFunction:
        """The step for so many splits of each shape and rows of its buffers, which make a trace their own."""
        key = splits, capacities
        if key not in kind.functions:
            attends = [bind_decode_attention(*x) for x in zip(kind.shapes, splits, strict=True)]
            one_token = kind.shapes[0].batch == kind.shapes[0].length == 1
            layers = self._fused if one_token else []
            function = _step_function(kind, attends, layers, self._modules, self._norm)
            arrays: list[Any] = [x for x in self._seen if isinstance(x, mx.array)]
            _put(kind.functions, key, _compiled_later(function, arrays) if self._compiles else function)
        return kind.functions[key]


def _put(recent: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value and not many others: traces are never freed by MLX itself."""
    while len(recent) >= _MOST_KEPT:
        del recent[next(iter(recent))]
    recent[key] = value


def _step_function(
    kind: _Kind,
    attends: Sequence[Callable[..., mx.array]],
    fused: Sequence[_Layer],
    modules: Sequence[nn.Module],
    norm: nn.RMSNorm,
) -> StepFunction:
    """All layers and the final norm, by prepared launches where there are some, else by the modules."""
    # No reference to the kind, which holds the function.
    shapes, shape_of, turns = kind.shapes, kind.shape_of, kind.turns

    def function(x: mx.array, positions: mx.array, after: mx.array, buffers: list[KV]) -> mx.array:
        tables = [
            rope_table(positions, shape.length, of_shape)
            for shape, of_shape in zip(shapes, turns, strict=True)
        ]
        residual, delta = x.astype(mx.float32), None
        if fused:
            for layer, i, rows in zip(fused, shape_of, buffers, strict=True):
                qkv, scores = layer.qkv(residual)
                out = attends[i](qkv, scores, *rows, *tables[i], after)
                (residual,) = layer.out(residual, out)
                (activations,) = layer.geglu(residual)
                (residual,) = layer.down(residual, activations)
        else:
            for module, i, rows in zip(modules, shape_of, buffers, strict=True):
                step = Step(FUSED, positions, table=tables[i], attend=attends[i])
                residual, delta = module(residual, delta, step, _Rows(rows, after))
        return add_rms_norm(residual, delta, norm.weight, eps=norm.eps)[1]

    return function


def _compiled_later(function: StepFunction, arrays: Sequence[mx.array]) -> StepFunction:
    """The function, compiled from its second call on.

    The first runs as it is: self-checks of kernels evaluate arrays, which cannot be done in a trace.

    Args:
        arrays: of the model.
    """
    # MLX finds traces by the function's address, in each thread for itself: this tells those of others apart.
    serial = next(_serials)

    def traced(_: int, *arguments: Any) -> mx.array:
        return function(*arguments)

    compiled = mx.compile(traced)
    calls = 0

    def call(*arguments: Any) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 1:
            return function(*arguments)
        if calls == 2:
            # A trace would compute again and again what is lazy.
            mx.eval(arrays)
        return compiled(serial, *arguments)

    return call


def _last_of(caches: Sequence[LayerCache]) -> mx.array | None:
    """What in-place writes to any of the caches come after."""
    pending = {id(cache.last): cache.last for cache in caches if cache.last is not None}
    if len(pending) > 1:
        for cache in caches:
            cache.sync()
        return None
    return next(iter(pending.values()), None)


def _prepare(layer: nn.Module, dtype: mx.Dtype) -> _Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_k_v_proj, attention.out_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    weights = [weight for linear in linears if (weight := weight_of(linear))]
    gate_weight = weight_of(attention.g_proj)
    if len(weights) < len(linears) or gate_weight is None or gate_weight.quantised:
        return None
    qkv, out, gate, up, down = weights
    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    read = [*norms, gate_weight.weight, *(w.scales if w.quantised else w.weight for w in weights)]
    if any(array.dtype != dtype for array in read):
        return None
    if not (
        can_norm_qkv(dtype, qkv, gate_weight.weight)
        and can_norm_geglu(dtype, gate, up)
        and can_linear_add(dtype, out)
        and can_linear_add(dtype, down)
    ):
        return None
    return _Layer(
        qkv=bind_norm_qkv(
            layer.input_layernorm.weight, qkv, gate_weight.weight, eps=layer.input_layernorm.eps
        ),
        out=bind_linear_add(out, dtype),
        geglu=bind_norm_geglu(
            layer.post_attention_layernorm.weight, gate, up, eps=layer.post_attention_layernorm.eps
        ),
        down=bind_linear_add(down, dtype),
    )
