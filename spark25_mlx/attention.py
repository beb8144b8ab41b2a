"""Which attention runs for which call, cache and backend; no arithmetic of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from .cache import LayerCache, SlidingKVCache, for_batch
from .custom_kernels.backend import backend_name
from .custom_kernels.decode_attention import (
    MAX_TOKENS,
    PLAIN,
    Shape,
    bind_decode_attention,
    can_decode,
    split_count,
)
from .custom_kernels.head_gate import head_gate
from .custom_kernels.qkv_rope import can_append, qkv_rope, qkv_rope_append
from .custom_kernels.rope import Table, rope_table
from .fusions import is_on

# Routes of `gated_attention`, best first.
FUSED = "decode_attention"  # one kernel appends in place and attends
IN_PLACE = "qkv_rope_append"  # one kernel appends in place, MLX attends
VALUES = "values"  # caches and attention as MLX arrays


@dataclass(frozen=True)
class Heads:
    """Shape of one layer's attention.

    Attributes:
        window: keys that a query of a sliding layer sees, itself included; None for a full layer.
        turns: rotary frequencies, uint64 [r / 2], as `rope_turns` gives them.
        gate_mode: "sigmoid" or "silu".
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int | None
    turns: mx.array
    gate_mode: str

    def shape(self, dtype: mx.Dtype, batch: int, length: int, kv_format: tuple[int, int]) -> Shape:
        """What `decode_attention` is compiled for."""
        return Shape(
            dtype,
            batch,
            length,
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            2 * self.turns.size,
            self.window,
            self.gate_mode,
            *kv_format,
            matrix=is_on("matrix_attention", backend_name()),
        )

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Block:
    """A range of queries, the first key that it is scored against, and the mask of its scores."""

    queries: slice
    first_key: int
    mask: mx.array | str | None

    def seen(self, k: Any, v: Any) -> tuple[Any, Any]:
        """The keys and values that the mask's columns stand for."""
        if not isinstance(self.mask, mx.array):
            return k, v
        keys = slice(self.first_key, self.first_key + self.mask.shape[-1])
        return (k, v) if self.queries == slice(None) else (k[:, :, keys], v[:, :, keys])


@dataclass(frozen=True)
class Step:
    """What the layers of one class share in one forward pass.

    Attributes:
        route: one of FUSED, IN_PLACE and VALUES.
        positions: int32 [B], position of the first token of each sequence.
        lengths: int32 [B], how many of the tokens are not padding; all on the route FUSED.
        blocks: the queries in order, for the routes other than FUSED.
        table: from `rope_table`, for FUSED.
        attend: the kernel from `bind_decode_attention`, for FUSED.
    """

    route: str
    positions: mx.array
    lengths: mx.array | None = None
    blocks: tuple[Block, ...] = ()
    table: Table | None = None
    attend: Callable[..., mx.array] | None = None


def plan(heads: Heads, cache: LayerCache | None, positions: mx.array, length: int, dtype: mx.Dtype) -> Step:
    """How the layers of a class attend in a forward pass of `length` tokens.

    Args:
        cache: the cache of a layer of the class, before the pass.
        dtype: of the activations.
    """
    batch = positions.size
    if cache is not None and (shape := fused_shape(heads, cache, batch, length, dtype)) is not None:
        attend = bind_decode_attention(shape, split_count(max(cache.offsets), shape))
        table = rope_table(positions, length, heads.turns)
        return Step(FUSED, positions, table=table, attend=attend)
    route = _route(heads, cache, length, dtype)
    valid = for_batch([length] if cache is None else cache.valid(length), batch)
    lengths = mx.array(valid, dtype=mx.int32)
    return Step(route, positions, lengths, blocks=tuple(_blocks(heads, cache, length)))


def fused_shape(heads: Heads, cache: LayerCache, batch: int, length: int, dtype: mx.Dtype) -> Shape | None:
    """What `decode_attention` is compiled for, if it can do the next `length` tokens of each sequence.

    Args:
        batch: sequences, which a fresh cache does not know yet.
    """
    if not _writable(cache, length) or min(cache.valid(length)) < length:
        return None
    shape = heads.shape(dtype, batch, length, cache.kv_format)
    return shape if can_decode(shape) else None


def _writable(cache: LayerCache, length: int) -> bool:
    """Whether kernels write so many tokens in place: few, and none over keys that the first of them sees."""
    return length <= min(MAX_TOKENS, cache.slack + 1)


def _route(heads: Heads, cache: LayerCache | None, length: int, dtype: mx.Dtype) -> str:
    if cache is None or cache.kv_format != PLAIN or not _writable(cache, length):
        return VALUES
    # MLX reads a ring in one piece: with several queries, some would see keys of others' future.
    if (heads.window is None or length == 1) and can_append(
        dtype, heads.head_dim, 2 * heads.turns.size, heads.n_heads, heads.n_kv_heads
    ):
        return IN_PLACE
    return VALUES


def _blocks(heads: Heads, cache: LayerCache | None, length: int) -> list[Block]:
    """A sliding layer's queries go in blocks of a window, so that no query is scored against all keys."""
    window = heads.window
    if window is None or length <= window:
        alone = "causal" if length > 1 else None
        return [Block(slice(None), 0, alone if cache is None else cache.mask(length))]
    history = cache.history if isinstance(cache, SlidingKVCache) else [0]
    before = max(history)
    blocks = []
    for start in range(0, length, window):
        end = min(start + window, length)
        first = max(0, before + start - window + 1)
        queries = before + mx.arange(start, end)[:, None]
        keys = mx.arange(first, before + end)
        mask = (keys <= queries) & (queries - keys < window)
        if len(set(history)) > 1:
            mask = mask & (keys >= before - mx.array(history)[:, None, None, None])
        blocks.append(Block(slice(start, end), first, mask))
    return blocks


def gated_attention(
    qkv: mx.array, scores: mx.array, heads: Heads, step: Step, cache: LayerCache | None
) -> mx.array:
    """Rotary embedding, append to the cache, attention, and the headwise gate.

    Args:
        qkv: [B, L, (n_heads + 2 n_kv_heads) * head_dim].
        scores: output of `g_proj` [B, L, n_heads].
        step: of this layer's class, from `plan`.

    Returns:
        [B, L, n_heads * head_dim].
    """
    if step.attend is not None and step.table is not None and cache is not None:
        B, L, _ = qkv.shape
        keys, values = cache.reserve(L, shape=(B, heads.n_kv_heads, heads.head_dim), dtype=qkv.dtype)
        after = qkv if cache.last is None else cache.last
        out = step.attend(qkv, scores, keys, values, *step.table, after)
        cache.commit(L, out)
        return out
    if step.route == IN_PLACE and step.lengths is not None and cache is not None:
        q, k, v = _append_in_place(qkv, heads, step.positions, step.lengths, cache)
    else:
        q, k, v = qkv_rope(
            qkv, step.positions, heads.turns, n_heads=heads.n_heads, n_kv_heads=heads.n_kv_heads
        )
        if cache is not None:
            k, v = cache.append(k, v)
    outs = [
        scaled_dot_product_attention(
            q[:, :, block.queries], *block.seen(k, v), cache=cache, scale=heads.scale, mask=block.mask
        )
        for block in step.blocks
    ]
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)
    if step.route == IN_PLACE and cache is not None:
        # The next writer waits for this read.
        cache.commit(qkv.shape[1], out)
    return head_gate(out, scores, mode=heads.gate_mode)


def _append_in_place(
    qkv: mx.array, heads: Heads, positions: mx.array, lengths: mx.array, cache: LayerCache
) -> tuple[mx.array, mx.array, mx.array]:
    """Rotated queries, and the cache's keys and values with the new ones; the caller commits."""
    B, L, _ = qkv.shape
    keys, values = cache.reserve(L, shape=(B, heads.n_kv_heads, heads.head_dim), dtype=qkv.dtype)
    q = qkv_rope_append(
        qkv,
        keys,
        values,
        positions,
        lengths,
        heads.turns,
        qkv if cache.last is None else cache.last,
        n_heads=heads.n_heads,
        n_kv_heads=heads.n_kv_heads,
    )
    n = min(max(cache.offsets) + L, keys.shape[2])
    return q, keys[:, :, :n], values[:, :, :n]
