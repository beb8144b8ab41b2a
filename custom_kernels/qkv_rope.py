"""Split of the fused QKV projection into heads, the rotary embedding of queries and keys, and the in-place
append of keys and values to their cache rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .backend import Kernel, fits_grid
from .rope import rope_cos_sin, rope_turns


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Half-split (NeoX) rotation of the leading r dimensions; the others pass through.

    (x1, x2) = (x[:r/2], x[r/2:r]) -> (x1 cos - x2 sin, x2 cos + x1 sin) in fp32, rounded once.

    Args:
        x: [B, H, L, D].
        cos, sin: fp32 [B, L, r / 2].

    Returns:
        [B, H, L, D] in x's dtype.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    x1 = x[..., :half].astype(mx.float32)
    x2 = x[..., half : 2 * half].astype(mx.float32)
    rotated = [(x1 * cos - x2 * sin).astype(x.dtype), (x2 * cos + x1 * sin).astype(x.dtype)]
    return mx.concatenate([*rotated, x[..., 2 * half :]], axis=-1)


def qkv_rope_reference(
    qkv: mx.array, positions: mx.array, turns: mx.array, *, n_heads: int, n_kv_heads: int
) -> tuple[mx.array, mx.array, mx.array]:
    """`qkv_rope` in mx ops."""
    B, L, width = qkv.shape
    heads = n_heads + 2 * n_kv_heads
    x = qkv.reshape(B, L, heads, width // heads).transpose(0, 2, 1, 3)
    q, k, v = mx.split(x, [n_heads, n_heads + n_kv_heads], axis=1)
    cos, sin = rope_cos_sin(turns, positions[:, None] + mx.arange(L))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def qkv_rope(
    qkv: mx.array, positions: mx.array, turns: mx.array, *, n_heads: int, n_kv_heads: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries and keys rotated, values as they are (equations 3 and 4 of `model`).

    fp32 inside, one rounding; phases are exact at any position (see `rope`).

    Args:
        qkv: [B, L, (n_heads + 2 n_kv_heads) * D], rows [Q | K | V] with the heads of each contiguous.
        positions: int32 [B], position of the first token of each row.
        turns: uint64 [r / 2] from `rope_turns`; r <= D dimensions are rotated.

    Returns:
        q [B, n_heads, L, D], k and v [B, n_kv_heads, L, D], in qkv's dtype.
    """
    D = qkv.shape[-1] // (n_heads + 2 * n_kv_heads)
    fits = D % 32 == 0 and fits_grid(qkv.shape[0] * qkv.shape[1])
    if not fits or not _KERNEL.ready(qkv.dtype, D, 2 * turns.size, n_heads, n_kv_heads):
        return qkv_rope_reference(qkv, positions, turns, n_heads=n_heads, n_kv_heads=n_kv_heads)
    B, L, _ = qkv.shape
    q, k, v = _KERNEL.launch(
        [qkv, positions, turns],
        **_geometry(qkv, turns, n_heads, n_kv_heads, D),
        output_shapes=[(B, n_heads, L, D), (B, n_kv_heads, L, D), (B, n_kv_heads, L, D)],
        output_dtypes=[qkv.dtype] * 3,
    )
    return q, k, v


def qkv_rope_append_reference(
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    lengths: mx.array,
    turns: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """`qkv_rope_append` in mx ops: returns (q, new keys buffer, new values buffer) and changes nothing."""
    q, k, v = qkv_rope_reference(qkv, positions, turns, n_heads=n_heads, n_kv_heads=n_kv_heads)
    keys, values = put_tokens([keys, values], [k, v], positions, lengths)
    return q, keys, values


def put_tokens(
    buffers: Sequence[mx.array], rows: Sequence[mx.array], positions: mx.array, lengths: mx.array
) -> list[mx.array]:
    """Cache buffers [B, KV, capacity, _] with the rows [B, KV, L, _] of new tokens; arguments as those of
    `qkv_rope_append`. The buffers do not change."""
    # New arrays, for assignment by index replaces the contents of the caller's.
    new = [buffer[:] for buffer in buffers]
    capacity, L = buffers[0].shape[2], rows[0].shape[2]
    for b, (start, valid) in enumerate(np.array([positions, lengths]).T.tolist()):
        tokens = mx.arange(max(0, valid - capacity), min(valid, L))
        if tokens.size:
            for buffer, row in zip(new, rows, strict=True):
                buffer[b, :, (start + tokens) % capacity] = row[b][:, tokens]
    return new


def qkv_rope_append(
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    lengths: mx.array,
    turns: mx.array,
    after: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
) -> mx.array:
    """`qkv_rope` that writes keys and values **in place** into cache rows: row = position modulo capacity.

    The buffers change behind MLX's back. The caller owns them alone, binds the returned q in whatever reads
    them next, and hands the last reader's output to the next call as `after`: that orders the accesses.

    Args:
        qkv: [B, L, (n_heads + 2 n_kv_heads) * D].
        keys, values: [B, n_kv_heads, capacity, D], whole row-contiguous arrays; written.
        positions: int32 [B], position of the first token of each row.
        lengths: int32 [B], tokens of each row that are not padding; only the last `capacity` of them are
            written.
        turns: uint64 [r / 2] from `rope_turns`.
        after: an output of the last kernel that read the buffers; bound, not read.

    Returns:
        q [B, n_heads, L, D].

    Raises:
        RuntimeError: no kernel for these shapes runs here; see `can_append`.
    """
    D = keys.shape[-1]
    if not can_append(qkv.dtype, D, 2 * turns.size, n_heads, n_kv_heads):
        raise RuntimeError("qkv_rope_append: writing in place needs a GPU kernel, and none runs here")
    B, L, _ = qkv.shape
    return _APPEND.launch(
        [qkv, keys, values, positions, lengths, turns, after],
        **_geometry(qkv, turns, n_heads, n_kv_heads, D),
        output_shapes=[(B, n_heads, L, D)],
        output_dtypes=[qkv.dtype],
    )[0]


def can_append(dtype: mx.Dtype, head_dim: int, dims: int, n_heads: int, n_kv_heads: int) -> bool:
    """Whether `qkv_rope_append` runs here, its in-place writes seen by MLX's own reads included."""
    return head_dim % 32 == 0 and _APPEND.ready(dtype, head_dim, dims, n_heads, n_kv_heads)


def _geometry(qkv: mx.array, turns: mx.array, n_heads: int, n_kv_heads: int, D: int) -> dict[str, Any]:
    B, L, _ = qkv.shape
    return {
        "grid": (D // 2, n_heads + 2 * n_kv_heads, B * L),
        "threadgroup": (D // 2, 1, 1),
        "constants": {"T": qkv.dtype, "H": n_heads, "KV": n_kv_heads, "D": D, "R": 2 * turns.size},
    }


def _example(dtype: mx.Dtype, head_dim: int, dims: int, heads: int) -> tuple[mx.array, mx.array, mx.array]:
    qkv = mx.random.normal((2, 3, heads * head_dim), key=mx.random.key(0)).astype(dtype)
    return qkv, mx.array([5, 1_000_003], dtype=mx.int32), rope_turns(10_000.0, dims)


def _check(
    dtype: mx.Dtype, head_dim: int, dims: int, n_heads: int = 2, n_kv_heads: int = 1
) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    inputs = _example(dtype, head_dim, dims, n_heads + 2 * n_kv_heads)
    ours, reference = (
        f(*inputs, n_heads=n_heads, n_kv_heads=n_kv_heads) for f in (qkv_rope, qkv_rope_reference)
    )
    return ours, reference


def _check_append(
    dtype: mx.Dtype, head_dim: int, dims: int, n_heads: int = 2, n_kv_heads: int = 1
) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    """Writes through the kernel, reads through MLX: also the self-test of in-place writing."""
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads}
    qkv, positions, turns = _example(dtype, head_dim, dims, n_heads + 2 * n_kv_heads)
    lengths = mx.array([3, 2], dtype=mx.int32)
    buffer = (2, n_kv_heads, 7, head_dim)
    keys, values = (mx.full(buffer, fill, dtype=dtype) for fill in (1, 2))
    expected = qkv_rope_append_reference(qkv, keys, values, positions, lengths, turns, **heads)
    # What the in-place writes are compared with must be there before them.
    mx.eval(expected)
    q = qkv_rope_append(qkv, keys, values, positions, lengths, turns, qkv, **heads)
    mx.eval(q)
    return (q, keys, values), expected


_KERNEL = Kernel(
    "qkv_rope",
    inputs=["qkv", "positions", "turns"],
    outputs=["q", "k", "v"],
    headers=["phase"],
    check=_check,
)
_APPEND = Kernel(
    "qkv_rope",
    variant="qkv_rope_append",
    inputs=["qkv", "keys", "values", "positions", "lengths", "turns", "after"],
    outputs=["q"],
    headers=["phase"],
    defines=["APPEND"],
    check=_check_append,
)
