"""The Spark model in float64 numpy, from the equations of its reference implementation. No mlx inside.

With h the residual stream, r the number of rotated dimensions and d the dimension of a head:

1.  h = E[ids]
2.  RMSNorm(x) = w x / sqrt(mean(x^2) + eps)
3.  x = RMSNorm(h); [q | k | v] = x W_qkv^T, rows of a head contiguous; s = x W_g^T, one score a head
4.  inv_freq_j = theta^(-2j/r), j = 0 .. r/2 - 1, r = int(d * partial); x1, x2 = x[0 : r/2], x[r/2 : r];
    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) with the angle position * inv_freq; x[r:] passes through
5.  o = softmax(q k^T / sqrt(d) + mask) v, query head i reading key head i // (heads / kv_heads)
6.  mask: key <= query; on sliding layers also query - key < window
7.  o[head] *= sigmoid(s) (or s sigmoid(s) for `silu`), before the output projection
8.  h += o W_out^T; h += MLP(RMSNorm(h))
9.  MLP(x) = (GELU(x W_gate^T) * x W_up^T) W_down^T with GELU(z) = z (1 + erf(z / sqrt 2)) / 2
10. logits = RMSNorm(h) E^T, or the untied head's matrix in the place of E
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

try:
    from scipy.special import erf as _erf
except ImportError:
    _erf = np.frompyfunc(math.erf, 1, 1)


class _InFloat64(Mapping[str, np.ndarray]):
    """Tensors converted when they are used: all of a large model's at once would not fit."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._weights[name], dtype=np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def forward(weights: Mapping[str, np.ndarray], config: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Logits of every position, equations 1 to 10.

    Args:
        weights: tensors under their published names, any float dtype; computed with in float64.
        config: a `config.json` mapping.
        tokens: ids [B, L].

    Returns:
        float64 [B, L, vocab_size].
    """
    w = _InFloat64(weights)
    pattern = ["sliding_attention"] * 3 + ["full_attention"]
    layers = config["num_hidden_layers"]
    layer_types = config.get("layer_types") or [pattern[i % 4] for i in range(layers)]
    eps = config.get("rms_norm_eps", 1e-6)

    h = w["model.embedding.weight"][tokens]
    for i, kind in enumerate(layer_types):
        name = f"model.layers.{i}"
        x = rms_norm(h, w[f"{name}.input_layernorm.weight"], eps)
        h = h + attention(x, w, f"{name}.self_attn", kind, config)
        x = rms_norm(h, w[f"{name}.post_attention_layernorm.weight"], eps)
        inner = gelu(_linear(x, w, f"{name}.mlp.gate_proj")) * _linear(x, w, f"{name}.mlp.up_proj")
        h = h + _linear(inner, w, f"{name}.mlp.down_proj")
    x = rms_norm(h, w["model.norm.weight"], eps)
    head = "model.embedding.weight" if config.get("tie_word_embeddings", True) else "lm_head.weight"
    return x @ w[head].T


def attention(
    x: np.ndarray, w: Mapping[str, np.ndarray], name: str, kind: str, config: Mapping[str, Any]
) -> np.ndarray:
    """Equations 3 to 7 and the output projection: x [B, L, H] -> [B, L, H]."""
    B, L, _ = x.shape
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    qkv = _linear(x, w, f"{name}.q_k_v_proj").reshape(B, L, heads + 2 * kv_heads, dim).transpose(0, 2, 1, 3)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]

    rope = config["rope_parameters"][kind]
    angles = np.arange(L)[:, None] * inverse_frequencies(
        rope["rope_theta"], int(dim * rope["partial_rotary_factor"])
    )
    q, k = rotate(q, angles), rotate(k, angles)

    k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
    distance = np.arange(L)[:, None] - np.arange(L)[None]
    seen = distance >= 0
    if kind == "sliding_attention":
        seen &= distance < config["sliding_window"]
    scores = np.where(seen, q @ k.transpose(0, 1, 3, 2) / math.sqrt(dim), -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = (scores / scores.sum(-1, keepdims=True)) @ v

    gate = head_gate(_linear(x, w, f"{name}.g_proj"), config.get("gate_attn_act_mode", "sigmoid"))
    out = out.transpose(0, 2, 1, 3) * gate[..., None]
    return _linear(out.reshape(B, L, heads * dim), w, f"{name}.out_proj")


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Equation 2 over the last axis."""
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def inverse_frequencies(theta: float, dims: int) -> np.ndarray:
    """Equation 4, float64 [dims / 2]; exponent, power and reciprocal are rounded to fp32, as published."""
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    powers = [math.pow(float(np.float32(theta)), float(e)) for e in exponents]
    return (np.float32(1.0) / np.array(powers, dtype=np.float32)).astype(np.float64)


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Equation 4: x [..., L, d] by angles [L, r / 2]."""
    half = angles.shape[-1]
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., 2 * half :]], axis=-1)


def head_gate(scores: np.ndarray, mode: str) -> np.ndarray:
    """Equation 7: the factor of each head."""
    sigmoid = 1.0 / (1.0 + np.exp(-scores))
    return {"sigmoid": sigmoid, "silu": scores * sigmoid}[mode]


def gelu(z: np.ndarray) -> np.ndarray:
    """Equation 9's GELU."""
    return 0.5 * z * (1.0 + np.asarray(_erf(z / math.sqrt(2.0)), dtype=np.float64))


def _linear(x: np.ndarray, w: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    y = x @ w[f"{name}.weight"].T
    bias = w.get(f"{name}.bias")
    return y if bias is None else y + bias
