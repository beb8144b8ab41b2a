"""What `spark25-mlx bench` measures: this package's model and mlx-lm's own, their caches, their memory.

Both models hold the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..cache import FullKVCache, quantized_cache
from ..checkpoint import check_folder
from ..config import DEFAULT_PATTERN, FULL, MODEL_TYPES, SLIDING, ModelArgs
from ..model import Model
from ..plugin import native_module
from .mlx_lm_command import check_config

OURS, NATIVE = "ours", "native"
GROUP_SIZE = 64
# Tokens of one forward pass of a prompt, as mlx-lm does it.
PREFILL_STEP = 2048
# Tokens that are put into a sliding cache at once.
_FILL_STEP = 8192


def _config(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": MODEL_TYPES[0],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "vocab_size": 131072,
        "sliding_window": 512,
        "layer_types": [DEFAULT_PATTERN[i % len(DEFAULT_PATTERN)] for i in range(layers)],
        "rope_parameters": {
            FULL: {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.25},
            SLIDING: {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
        "tie_word_embeddings": True,
        **more,
    }


# The published shapes, and that of examples/tiny.
SHAPES = {
    "4b": _config(2560, 10240, 36, 16, 4),
    "1.7b": _config(2048, 6656, 28, 8, 2),
    "tiny": _config(192, 256, 8, 4, 1, head_dim=64, vocab_size=2048, sliding_window=64),
}


@dataclass(frozen=True)
class Subject:
    """Models that share their weights.

    Attributes:
        name: of the shape or the checkpoint.
        weights: what the weights are, in words.
        args: their shape.
        models: by side, OURS and NATIVE or one of them.
        dtype: of activations and unquantised caches.
    """

    name: str
    weights: str
    args: ModelArgs
    models: dict[str, nn.Module]
    dtype: mx.Dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return _nbytes(next(iter(self.models.values())))

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads: an embedding that is no head is only looked up."""
        model = next(iter(self.models.values()))
        return self.weight_bytes - (_nbytes(model.model.embedding) if "lm_head" in model else 0)


def random_subject(shape: str, bits: int, sides: tuple[str, ...], memory: int) -> Subject:
    """One of SHAPES with random bf16 weights, quantised for `bits` < 16.

    Raises:
        ValueError: the weights take more than `memory` bytes.
    """
    config = SHAPES[shape]
    model = Model(ModelArgs.from_dict(config))
    model.update(tree_map(_random, model.parameters()))
    _quantise(model, bits)
    model.load_weights(_weights(model))
    what = "random, bf16" if bits == 16 else f"random, {bits} bits (affine, groups of {GROUP_SIZE})"
    return _subject(shape, what, config, model, sides, memory)


def checkpoint_subject(folder: Path, bits: int | None, sides: tuple[str, ...], memory: int) -> Subject:
    """A checkpoint in a directory, quantised for `bits` < 16; None leaves its weights as they are.

    Raises:
        ValueError: it is no checkpoint of this family, is quantised already, or takes more than `memory`
            bytes.
    """
    if not folder.is_dir():
        raise ValueError(f"--model: {folder} is no directory; it must be the directory of a checkpoint")
    config = check_config(folder)
    if config["model_type"] not in MODEL_TYPES:
        known = " or ".join(MODEL_TYPES)
        raise ValueError(
            f"{folder / 'config.json'}: model_type is {config['model_type']!r}; it must be {known}"
        )
    quantised = "quantization" in config or "quantization_config" in config
    if quantised and bits is not None:
        raise ValueError(f"--bits: the weights in {folder} are quantised already; leave the flag out")
    check_folder(folder)
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, lazy=True, get_model_classes=lambda config: (Model, ModelArgs))
    if bits is not None and bits < 16:
        _quantise(model, bits)
        model.load_weights(_weights(model))
    what = "as stored" if bits is None else f"{bits} bits"
    return _subject(folder.name, what, config, model, sides, memory)


def _subject(
    name: str, weights: str, config: dict[str, Any], model: Model, sides: tuple[str, ...], memory: int
) -> Subject:
    needed = _nbytes(model)
    if needed > memory:
        raise ValueError(f"the weights take {_gb(needed)}; the device has {_gb(memory)}")
    # A layer at a time, so that what the weights are made from is soon free again.
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    model.eval()
    dtype = model.model.embedding(mx.array([0])).dtype
    makers: dict[str, Callable[[], nn.Module]] = {
        OURS: lambda: model,
        NATIVE: lambda: _native_twin(model, config),
    }
    return Subject(name, weights, model.args, {side: makers[side]() for side in sides}, dtype)


def _native_twin(model: Model, config: dict[str, Any]) -> nn.Module:
    """mlx-lm's own model with the very arrays of ours."""
    try:
        native = native_module()
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{error}; --only ours measures without it") from error
    config = {**config, "tie_word_embeddings": "lm_head" not in model}
    twin = native.Model(native.ModelArgs.from_dict(config))
    modules = dict(model.named_modules())

    def format_of(path: str, _: nn.Module) -> bool | dict[str, Any]:
        own = modules.get(path)
        if not isinstance(own, nn.QuantizedLinear | nn.QuantizedEmbedding):
            return False
        return {"group_size": own.group_size, "bits": own.bits, "mode": own.mode}

    nn.quantize(twin, class_predicate=format_of)
    twin.load_weights(_weights(model))
    twin.eval()
    return twin


def _random(parameter: mx.array) -> mx.array:
    if parameter.ndim == 1:
        return mx.ones(parameter.shape, mx.bfloat16)
    return mx.random.normal(parameter.shape, dtype=mx.bfloat16, scale=0.02)


def _quantise(model: Model, bits: int) -> None:
    if bits == 16:
        return
    wanted = model.quant_predicate

    def quantised(path: str, module: nn.Module) -> bool:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0
        return fits and wanted(path, module)

    nn.quantize(model, GROUP_SIZE, bits, class_predicate=quantised)


def _weights(module: nn.Module) -> list[tuple[str, mx.array]]:
    return list(dict(tree_flatten(module.parameters())).items())


def _nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in _weights(module))


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


# --- caches ---


def empty_cache(subject: Subject, side: str, kv_bits: int | None = None) -> list[Any]:
    """The caches that the side's model makes, with the full layers' quantised for `kv_bits`.

    mlx-lm's own model refuses --kv-bits, because its sliding caches cannot be quantised; here its full
    layers get mlx-lm's quantised cache nevertheless.
    """
    cache = subject.models[side].make_cache()
    if kv_bits is None:
        return cache
    if side == OURS:
        return [quantized_cache(GROUP_SIZE, kv_bits) if isinstance(c, FullKVCache) else c for c in cache]
    from mlx_lm.models.cache import KVCache, QuantizedKVCache

    return [QuantizedKVCache(GROUP_SIZE, kv_bits) if isinstance(c, KVCache) else c for c in cache]


def filled_cache(subject: Subject, side: str, context: int, batch: int, kv_bits: int | None) -> list[Any]:
    """Caches with random keys and values at positions 0 .. context - 1, the same ones in every layer."""
    args = subject.args
    shape = (batch, args.num_key_value_heads, context, args.head_dim)
    rows = mx.random.normal(shape, dtype=subject.dtype, key=mx.random.key(0))
    cache = empty_cache(subject, side, kv_bits)
    for layer, kind in zip(cache, args.layer_types, strict=True):
        put = layer.append if side == OURS else layer.update_and_fetch
        step = _FILL_STEP if kind == SLIDING else context
        for start in range(0, context, step):
            piece = rows[:, :, start : start + step]
            put(piece, piece)
            mx.eval(layer.state)
    return cache


# --- memory ---


def available_memory() -> int:
    """Bytes that the default device can give this process now, as far as MLX knows."""
    limits = [mx.get_memory_limit()]
    if mx.default_device().type == mx.DeviceType.gpu:
        info = mx.device_info()
        limits += [int(info[k]) for k in ("free_memory", "max_recommended_working_set_size") if k in info]
    return min(limits)


def _token_bytes(subject: Subject, kv_bits: int | None) -> int:
    """Bytes of the keys and values of a token in one layer."""
    cache = FullKVCache() if kv_bits is None else quantized_cache(GROUP_SIZE, kv_bits)
    return cache.token_bytes(subject.args.num_key_value_heads, subject.args.head_dim, subject.dtype)


def read_bytes(subject: Subject, context: int, batch: int, kv_bits: int | None) -> int:
    """Bytes that a decode step cannot but read: each weight once, and the keys and values that are seen."""
    args = subject.args
    seen = min(context, args.sliding_window)
    full = args.layer_types.count(FULL) * context * _token_bytes(subject, kv_bits)
    sliding = args.layer_types.count(SLIDING) * seen * _token_bytes(subject, None)
    return round(subject.step_weight_bytes + batch * (full + sliding))


def decode_memory(subject: Subject, context: int, tokens: int, batch: int, kv_bits: int | None) -> int:
    """Estimate of the bytes that a decode case takes at its peak, weights included."""
    args = subject.args
    # Buffers grow ahead, and are filled from one unquantised layer's rows; growing copies a layer.
    rows = context + tokens + min(context // 4, 16384) + 256
    full = (args.layer_types.count(FULL) + 1) * rows * _token_bytes(subject, kv_bits)
    ring = args.sliding_window + min(context, _FILL_STEP)
    sliding = args.layer_types.count(SLIDING) * ring * _token_bytes(subject, None)
    filling = 2 * context * _token_bytes(subject, None)
    logits = 3 * 4 * args.vocab_size
    return round(subject.weight_bytes + batch * (full + sliding + filling + logits))


def prefill_memory(subject: Subject, length: int, batch: int, kv_bits: int | None) -> int:
    """Estimate of the bytes that a prefill case takes at its peak, weights included.

    With the whole scores of one piece of the prompt in one layer, in the activations' dtype and in fp32.
    """
    args = subject.args
    step = min(length, PREFILL_STEP)
    scores = args.num_attention_heads * step * length * (subject.dtype.size + 4)
    activations = step * 4 * (4 * args.hidden_size + 3 * args.intermediate_size)
    return decode_memory(subject, length, 1, batch, kv_bits) + batch * (scores + activations)
