"""Attention of a few new tokens over a KV cache, which it also appends to."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from .backend import Kernel
from .head_gate import head_gate_reference
from .qkv_rope import qkv_rope_append_reference
from .rope import rope_turns

# Tokens of one call: what speculative decoding verifies at once.
MAX_TOKENS = 8
_SIMDGROUPS = 8
# Query heads of one threadgroup: four keep the accumulators of a head_dim of 256 in registers.
_MOST_HEADS = 4
_MOST_SPLITS = 64


def decode_attention_reference(
    qkv: mx.array,
    scores: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    turns: mx.array,
    *,
    n_heads: int,
    window: int | None,
    mode: str,
) -> tuple[mx.array, mx.array, mx.array]:
    """`decode_attention` in mx ops: returns (out, new keys buffer, new values buffer) and changes nothing."""
    B, L, _ = qkv.shape
    n_kv_heads, capacity = keys.shape[1:3]
    lengths = mx.full((B,), L, dtype=mx.int32)
    q, keys, values = qkv_rope_append_reference(
        qkv, keys, values, positions, lengths, turns, n_heads=n_heads, n_kv_heads=n_kv_heads
    )
    last = positions[:, None, None, None] + L - 1
    # The newest position that has the row of each column.
    key_positions = last - (last - mx.arange(capacity)) % capacity
    query_positions = (positions[:, None] + mx.arange(L))[:, None, :, None]
    seen = (key_positions >= 0) & (key_positions <= query_positions)
    if window is not None:
        seen = seen & (query_positions - key_positions < window)
    # Sums and no matmuls, which some GPUs would do in less than fp32.
    group = n_heads // n_kv_heads
    k, v = (mx.repeat(x.astype(mx.float32), group, axis=1)[:, :, None] for x in (keys, values))
    logits = mx.sum(q.astype(mx.float32)[..., None, :] * k, axis=-1) * q.shape[-1] ** -0.5
    weights = mx.softmax(mx.where(seen, logits, -mx.inf), axis=-1)
    out = mx.sum(weights[..., None] * v, axis=-2).astype(qkv.dtype)
    return head_gate_reference(out, scores, mode=mode), keys, values


def decode_attention(
    qkv: mx.array,
    scores: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    turns: mx.array,
    after: mx.array,
    *,
    n_heads: int,
    window: int | None,
    mode: str,
    most_keys: int,
) -> mx.array:
    """Rotary embedding, append, causal attention over the cache, and the headwise gate, for up to 8 tokens.

    softmax(q kᵀ / sqrt D) v over the cached keys and the new ones up to each token (equations 3 to
    7 of `model`); keys and values are read once for all query heads of a KV head. Scores, softmax (online,
    base 2) and sums are fp32; rotated queries and keys are rounded to qkv's dtype, as is the result. New keys
    and values go **in place** to row = position modulo capacity; the rule of `qkv_rope_append` holds, with
    this call as the reader too.

    Args:
        qkv: [B, L, (n_heads + 2 n_kv_heads) * D], L <= MAX_TOKENS.
        scores: output of `g_proj` [B, L, n_heads].
        keys, values: [B, n_kv_heads, capacity, D], whole row-contiguous arrays; written. A ring must have
            capacity >= window + L - 1.
        positions: int32 [B], position of the first new token of each row; the rows before it are in the
            cache.
        turns: uint64 [r / 2] from `rope_turns`.
        after: an output of the last kernel that read the buffers; bound, not read.
        window: keys that a token sees, itself included; None for all.
        mode: of the gate, "sigmoid" or "silu".
        most_keys: the largest of `positions`, which sets how many threadgroups share the keys.

    Returns:
        [B, L, n_heads * D] in qkv's dtype.

    Raises:
        RuntimeError: no kernel for these shapes runs here; see `can_decode`.
    """
    B, L, _ = qkv.shape
    KV, _, D = keys.shape[1:]
    if not can_decode(qkv.dtype, D, 2 * turns.size, n_heads // KV, window, mode):
        raise RuntimeError("decode_attention: writing in place needs a GPU kernel, and none runs here")
    tile = _heads_of_tile(n_heads // KV)
    splits = split_count(most_keys if window is None else min(most_keys, window - 1))
    parts, stats = _ATTENTION.launch(
        [qkv, keys, values, positions, turns, after],
        grid=(splits * 32 * _SIMDGROUPS, n_heads // tile, B * L),
        threadgroup=(32 * _SIMDGROUPS, 1, 1),
        constants={
            "T": qkv.dtype,
            "H": n_heads,
            "KV": KV,
            "D": D,
            "R": 2 * turns.size,
            "GT": tile,
            "SIMDS": _SIMDGROUPS,
            "WINDOW": window or 0,
        },
        output_shapes=[(B, n_heads, L, splits, D), (B, n_heads, L, splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return _merge(parts, stats, scores, mode)


def _merge(parts: mx.array, stats: mx.array, scores: mx.array, mode: str) -> mx.array:
    B, H, L, _, D = parts.shape
    return _MERGE.launch(
        [parts, stats, scores],
        grid=(D, H, B * L),
        threadgroup=(D, 1, 1),
        constants={"T": scores.dtype, "H": H, "D": D, "SILU": mode == "silu"},
        output_shapes=[(B, L, H * D)],
        output_dtypes=[scores.dtype],
    )[0]


def can_decode(dtype: mx.Dtype, head_dim: int, dims: int, group: int, window: int | None, mode: str) -> bool:
    """Whether `decode_attention` runs here for heads of this shape.

    Args:
        dims: rotated dimensions.
        group: query heads of a KV head.
    """
    if head_dim % 32 or head_dim > 256:
        return False
    return _MERGE.ready(dtype, head_dim, mode) and _ATTENTION.ready(
        dtype, head_dim, dims, group, window, mode
    )


@cache
def split_count(n_keys: int) -> int:
    """Threadgroups that share `n_keys` cached keys: a power of two, so that few shapes occur."""
    splits = 1
    while splits < _MOST_SPLITS and splits * 32 < n_keys:
        splits *= 2
    return splits


def _heads_of_tile(group: int) -> int:
    return next(n for n in range(_MOST_HEADS, 0, -1) if group % n == 0)


def _check(
    dtype: mx.Dtype, head_dim: int, dims: int, group: int, window: int | None, mode: str
) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    """Two rows of two tokens, in a ring one that has wrapped; reads what was written in place through MLX."""
    capacity = 64 if window is None else window + 8
    positions = mx.array([17, 50 if window is None else 2 * capacity + 3], dtype=mx.int32)
    shape = (2, 1, capacity, head_dim)
    keys, values = (mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i in (0, 1))
    qkv = mx.random.normal((2, 2, (group + 2) * head_dim), key=mx.random.key(2)).astype(dtype)
    scores = mx.random.normal((2, 2, group), key=mx.random.key(3)).astype(dtype)
    turns = rope_turns(10_000.0, dims)
    options: dict[str, Any] = {"n_heads": group, "window": window, "mode": mode}
    expected = decode_attention_reference(qkv, scores, keys, values, positions, turns, **options)
    # What the in-place writes are compared with must be there before them.
    mx.eval(expected)
    out = decode_attention(qkv, scores, keys, values, positions, turns, qkv, **options, most_keys=200)
    mx.eval(out)
    return (out, keys, values), expected


def _check_merge(
    dtype: mx.Dtype, head_dim: int, mode: str
) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    parts = mx.random.normal((2, 3, 5, 4, head_dim), key=mx.random.key(0))
    stats = mx.random.uniform(1, 2, (2, 3, 5, 4, 2), key=mx.random.key(1))
    scores = mx.random.normal((2, 5, 3), key=mx.random.key(2)).astype(dtype)
    weight = mx.power(2.0, stats[..., :1] - mx.max(stats[..., :1], axis=-2, keepdims=True))
    out = mx.sum(weight * parts, axis=-2) / mx.sum(weight * stats[..., 1:], axis=-2)
    return (_merge(parts, stats, scores, mode),), (head_gate_reference(out.astype(dtype), scores, mode=mode),)


_ATTENTION = Kernel(
    "decode_attention",
    inputs=["qkv", "keys", "values", "positions", "turns", "after"],
    outputs=["parts", "stats"],
    headers=["common"],
    check=_check,
)
_MERGE = Kernel(
    "merge_gate",
    inputs=["parts", "stats", "scores"],
    outputs=["out"],
    check=_check_merge,
)
