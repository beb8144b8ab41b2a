"""Small Spark checkpoints with random weights, and the configs of the published ones."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from spark25_mlx.config import ModelArgs
from spark25_mlx.model import Model
from spark25_mlx.plugin import native_module

S, F = "sliding_attention", "full_attention"
Config = dict[str, Any]
Weights = dict[str, np.ndarray]


def tiny_config(**changes: Any) -> Config:
    """A `config.json` of the family's form, with one period of layers, GQA 4:1 and a window of 64.

    The hidden size is not heads x head_dim, as in the published 4B. A change to None removes the key.
    """
    config: Config = {
        "model_type": "spark2_5",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 97,
        "sliding_window": 64,
        "layer_types": [S, S, S, F],
        "rope_parameters": rope_parameters(),
        "rms_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "headwise_attn_output_gate": True,
        "gate_attn_act_mode": "sigmoid",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
    config |= changes
    return {key: value for key, value in config.items() if value is not None}


def rope_parameters() -> dict[str, dict[str, Any]]:
    """The published rotary parameters of both layer classes."""
    return {
        F: {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
        S: {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0, "rope_type": "default"},
    }


# The published shapes and what their tensors must add up to.
PUBLISHED: dict[str, tuple[Config, int]] = {
    "4B": (
        tiny_config(
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=256,
            vocab_size=131072,
            sliding_window=512,
            layer_types=[S, S, S, F] * 9,
        ),
        4_112_079_360,
    ),
    "1.7B": (
        tiny_config(
            hidden_size=2048,
            intermediate_size=6656,
            num_hidden_layers=28,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            vocab_size=131072,
            sliding_window=512,
            layer_types=[S, S, S, F] * 7,
        ),
        1_707_657_216,
    ),
}


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint in the published format."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embedding.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (
            hidden,
        )
        attention = {
            "q_k_v_proj": ((heads + 2 * kv_heads) * head_dim, hidden),
            "g_proj": (heads, hidden),
            "out_proj": (hidden, heads * head_dim),
        }
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        for block, matrices, bias in (
            ("self_attn", attention, config.get("attention_bias", False)),
            ("mlp", mlp, config.get("mlp_bias", False)),
        ):
            for name, shape in matrices.items():
                shapes[f"{layer}.{block}.{name}.weight"] = shape
                if bias:
                    shapes[f"{layer}.{block}.{name}.bias"] = shape[:1]
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def random_weights(config: Config, seed: int = 0) -> Weights:
    """fp32 weights that keep every activation of order one, so that a fault anywhere shows in the logits.

    Matrices are N(0, 1 / fan_in); those in front of a nonlinearity are wider, which makes the attention pick
    few keys and the gates and GELUs work away from their linear range.
    """
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, shape in parameter_shapes(config).items():
        value = rng.standard_normal(shape)
        if "norm" in name:
            value = 1.0 + 0.3 * value
        elif name.endswith(".bias"):
            value = 0.3 * value
        elif name != "model.embedding.weight":
            gain = {"q_k_v_proj": 1.5, "g_proj": 2.0, "gate_proj": 1.5}.get(name.split(".")[-2], 1.0)
            value *= gain / math.sqrt(shape[-1])
        weights[name] = value.astype(np.float32)
    return weights


def flat(tree: Any) -> dict[str, mx.array]:
    """The arrays of a tree of parameters or gradients by their dotted names."""
    return dict(tree_flatten(tree))


def in_dtype(weights: Weights, dtype: mx.Dtype) -> Weights:
    """The weights rounded to a dtype, in fp32."""
    return {name: np.array(mx.array(w).astype(dtype).astype(mx.float32)) for name, w in weights.items()}


def random_tokens(config: Config, length: int, batch: int = 1, seed: int = 1) -> np.ndarray:
    """Token ids int32 [batch, length]."""
    return np.random.default_rng(seed).integers(0, config["vocab_size"], (batch, length), dtype=np.int32)


def build(config: Config, weights: Weights, dtype: mx.Dtype = mx.float32) -> Model:
    """Our model with these weights, in eval mode."""
    model = Model(ModelArgs.from_dict(config))
    model.load_weights([(name, mx.array(w).astype(dtype)) for name, w in weights.items()])
    model.eval()
    return model


def build_native(config: Config, weights: Weights, dtype: mx.Dtype = mx.float32) -> Any:
    """mlx-lm's own model with these weights, in eval mode."""
    native = native_module()
    model = native.Model(native.ModelArgs.from_dict(config))
    model.load_weights([(name, mx.array(w).astype(dtype)) for name, w in weights.items()])
    model.eval()
    return model


def logits_of(model: Any, tokens: np.ndarray, cache: list[Any] | None = None) -> np.ndarray:
    """Logits of one call, float64 [B, L, V]."""
    return np.array(model(mx.array(tokens), cache).astype(mx.float32)).astype(np.float64)
