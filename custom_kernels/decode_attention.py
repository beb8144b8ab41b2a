"""Attention of a few new tokens over a KV cache, which it also appends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from .backend import Constant, Kernel, Launch, backend_key, backend_name
from .head_gate import head_gate_reference
from .qkv_rope import qkv_rope_append_reference
from .rope import rope_table, rope_turns

# Tokens of one call: what speculative decoding verifies at once.
MAX_TOKENS = 8
_SIMDGROUPS = 8
# Up to so many keys, one threadgroup a query head does all: a second pass would cost more than it saves.
_MOST_FINAL_KEYS = 640
_FINAL_SIMDGROUPS = 8
# (on Metal, more than two heads) -> keys whose loads a simdgroup has under way. Metal has half of CUDA's
# registers for a thread.
_KEYS_AT_ONCE = {(False, False): 8, (False, True): 4, (True, False): 4, (True, True): 2}
# Query heads of one threadgroup: four keep the accumulators of a head_dim of 256 in registers.
_MOST_HEADS = 4
# The merge kernel knows two splits a lane.
_MOST_SPLITS = 64
Outputs = tuple[tuple[mx.array, ...], tuple[mx.array, ...]]
_BOUND: dict[tuple[object, Shape, int], Callable[..., mx.array]] = {}


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
    7 of `model`). Up to 640 keys, one threadgroup a query head does all; beyond that keys and values are
    read once for up to four query heads of a KV head. Scores, softmax (online, base 2) and sums are fp32;
    rotated queries and keys are rounded to qkv's dtype, as is the result. New keys and values go **in place**
    to row = position modulo capacity; the rule of `qkv_rope_append` holds, with this call as the reader too.

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
    shape = Shape(qkv.dtype, B, L, n_heads, KV, D, 2 * turns.size, window, mode)
    if not can_decode(shape):
        raise RuntimeError("decode_attention: writing in place needs a GPU kernel, and none runs here")
    splits = split_count(most_keys, window)
    cos, sin = rope_table(positions, L, turns)
    return bind_decode_attention(shape, splits)(qkv, scores, keys, values, positions, cos, sin, after)


@dataclass(frozen=True)
class Shape:
    """What `decode_attention` is compiled for."""

    dtype: mx.Dtype
    batch: int
    length: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    dims: int
    window: int | None
    mode: str


def bind_decode_attention(shape: Shape, splits: int) -> Callable[..., mx.array]:
    """`decode_attention` as a function of its arrays, for many calls: (qkv, scores, keys, values, positions,
    cos, sin, after), with cos and sin from `rope_table`.

    Args:
        splits: threadgroups that share the keys, from `split_count`.
    """
    key = (backend_key(), shape, splits)
    if key not in _BOUND:
        _BOUND[key] = _bind(shape, splits)
    return _BOUND[key]


def _bind(shape: Shape, splits: int) -> Callable[..., mx.array]:
    H, B, L, D = shape.n_heads, shape.batch, shape.length, shape.head_dim
    final = splits == 1
    simdgroups = _FINAL_SIMDGROUPS if final else _SIMDGROUPS
    tile = 1 if final else _heads_of_tile(H // shape.n_kv_heads)
    keys_at_once = _KEYS_AT_ONCE[backend_name() == "metal", tile > 2]
    geometry: dict[str, Any] = {
        "grid": (splits * 32 * simdgroups, H // tile, B * L),
        "threadgroup": (32 * simdgroups, 1, 1),
    }
    constants: dict[str, Constant] = {
        "T": shape.dtype,
        "H": H,
        "KV": shape.n_kv_heads,
        "D": D,
        "R": shape.dims,
        "GT": tile,
        "U": keys_at_once,
        "SCORES": 1 << (tile * keys_at_once - 1).bit_length(),
        "SIMDS": simdgroups,
        "WINDOW": shape.window or 0,
    }
    if final:
        whole = _FINAL.bind(
            **geometry,
            constants={**constants, "SILU": shape.mode == "silu"},
            output_shapes=[(B, L, H * D)],
            output_dtypes=[shape.dtype],
        )

        def call_final(
            qkv: mx.array, scores: mx.array, keys: mx.array, values: mx.array, *rest: mx.array
        ) -> mx.array:
            return whole(inputs=[qkv, keys, values, *rest, scores])[0]

        return call_final

    attention = _ATTENTION.bind(
        **geometry,
        constants=constants,
        output_shapes=[(B, H, L, splits, D), (B, H, L, splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    merge = _bind_merge(shape.dtype, (B, H, L, splits, D), shape.mode)

    def call(qkv: mx.array, scores: mx.array, keys: mx.array, values: mx.array, *rest: mx.array) -> mx.array:
        parts, stats = attention(inputs=[qkv, keys, values, *rest])
        return merge(inputs=[parts, stats, scores])[0]

    return call


def _bind_merge(dtype: mx.Dtype, shape: tuple[int, ...], mode: str) -> Launch:
    B, H, L, _, D = shape
    return _MERGE.bind(
        grid=(32 * _SIMDGROUPS, H, B * L),
        threadgroup=(32 * _SIMDGROUPS, 1, 1),
        constants={"T": dtype, "H": H, "D": D, "SIMDS": _SIMDGROUPS, "SILU": mode == "silu"},
        output_shapes=[(B, L, H * D)],
        output_dtypes=[dtype],
    )


def can_decode(shape: Shape) -> bool:
    """Whether `decode_attention` runs here for heads of this shape, whatever the batch and the length."""
    if shape.head_dim % 32 or shape.head_dim > 256:
        return False
    group = shape.n_heads // shape.n_kv_heads
    variant = (shape.dtype, shape.head_dim, shape.dims, group, shape.window, shape.mode, shape.n_kv_heads)
    if not _FINAL.ready(*variant):
        return False
    # A window that one threadgroup can do never needs the others.
    if split_count(1 << 30, shape.window) == 1:
        return True
    return _MERGE.ready(shape.dtype, shape.head_dim, shape.mode, shape.n_heads) and _ATTENTION.ready(*variant)


@cache
def split_count(offset: int, window: int | None) -> int:
    """Threadgroups that share the cached keys of a token: a power of two, so that few shapes occur.

    Args:
        offset: tokens in the cache, of the longest sequence.
        window: as in `decode_attention`.
    """
    n_keys = offset if window is None else min(offset, window - 1)
    if n_keys <= _MOST_FINAL_KEYS:
        return 1
    splits = 8
    while splits < _MOST_SPLITS and splits * 32 < n_keys:
        splits *= 2
    return splits


def _heads_of_tile(group: int) -> int:
    return next(n for n in range(_MOST_HEADS, 0, -1) if group % n == 0)


def _check(
    dtype: mx.Dtype, head_dim: int, dims: int, group: int, window: int | None, mode: str, n_kv_heads: int = 1
) -> Outputs:
    return _compare(Shape(dtype, 2, 2, group * n_kv_heads, n_kv_heads, head_dim, dims, window, mode), 8)


def _check_final(
    dtype: mx.Dtype, head_dim: int, dims: int, group: int, window: int | None, mode: str, n_kv_heads: int = 1
) -> Outputs:
    return _compare(Shape(dtype, 2, 2, group * n_kv_heads, n_kv_heads, head_dim, dims, window, mode), 1)


def _compare(shape: Shape, splits: int) -> Outputs:
    """Two rows of two tokens, in a ring one that has wrapped; reads what was written in place through MLX."""
    n_heads, n_kv_heads, window, dtype = shape.n_heads, shape.n_kv_heads, shape.window, shape.dtype
    capacity = 64 if window is None else window + 8
    positions = mx.array([17, 50 if window is None else 2 * capacity + 3], dtype=mx.int32)
    buffer = (2, n_kv_heads, capacity, shape.head_dim)
    keys, values = (mx.random.normal(buffer, key=mx.random.key(i)).astype(dtype) for i in (0, 1))
    width = (n_heads + 2 * n_kv_heads) * shape.head_dim
    qkv = mx.random.normal((2, 2, width), key=mx.random.key(2)).astype(dtype)
    scores = mx.random.normal((2, 2, n_heads), key=mx.random.key(3)).astype(dtype)
    turns = rope_turns(10_000.0, shape.dims)
    expected = decode_attention_reference(
        qkv, scores, keys, values, positions, turns, n_heads=n_heads, window=window, mode=shape.mode
    )
    # What the in-place writes are compared with must be there before them.
    mx.eval(expected)
    attend = bind_decode_attention(shape, splits)
    out = attend(qkv, scores, keys, values, positions, *rope_table(positions, 2, turns), qkv)
    mx.eval(out)
    return (out, keys, values), expected


def _check_merge(dtype: mx.Dtype, head_dim: int, mode: str, n_heads: int = 3) -> Outputs:
    parts = mx.random.normal((2, n_heads, 5, 4, head_dim), key=mx.random.key(0))
    stats = mx.random.uniform(1, 2, (2, n_heads, 5, 4, 2), key=mx.random.key(1))
    scores = mx.random.normal((2, 5, n_heads), key=mx.random.key(2)).astype(dtype)
    weight = mx.power(2.0, stats[..., :1] - mx.max(stats[..., :1], axis=-2, keepdims=True))
    out = mx.sum(weight * parts, axis=-2) / mx.sum(weight * stats[..., 1:], axis=-2)
    ours = _bind_merge(dtype, parts.shape, mode)(inputs=[parts, stats, scores])[0]
    return (ours,), (head_gate_reference(out.astype(dtype), scores, mode=mode),)


_INPUTS = ["qkv", "keys", "values", "positions", "cosines", "sines", "after"]
_ATTENTION = Kernel(
    "decode_attention", inputs=_INPUTS, outputs=["parts", "stats"], headers=["common"], check=_check
)
_FINAL = Kernel(
    "decode_attention",
    variant="decode_attention_final",
    inputs=[*_INPUTS, "scores"],
    outputs=["out"],
    headers=["common", "gate"],
    defines=["FINAL"],
    check=_check_final,
)
_MERGE = Kernel(
    "merge_gate",
    inputs=["parts", "stats", "scores"],
    outputs=["out"],
    headers=["common", "gate"],
    check=_check_merge,
)
