"""Attention of a few new tokens over a KV cache, which it also appends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from .backend import Constant, Kernel, Launch, backend_key, backend_name
from .head_gate import head_gate_reference
from .qkv_rope import put_tokens, qkv_rope_reference
from .rope import rope_table, rope_turns
from .turbo import HEAD_DIMS, TURBO, rotation, turbo_dequantize, turbo_quantize

# Tokens of one call: what speculative decoding verifies at once.
MAX_TOKENS = 8
# Up to so many plain keys, one launch does all: a second pass would cost more than it saves.
_MOST_FINAL_KEYS = 640
_MERGE_SIMDGROUPS = 8
# Query heads of one threadgroup: four keep the accumulators of a head_dim of 256 in registers.
_MOST_HEADS = 4
# The merge kernel knows two splits a lane.
_MOST_SPLITS = 64
# Threadgroups of a call that fill the largest GPUs, and keys of a split that are worth a threadgroup.
_THREADGROUPS = 128
_KEYS_OF_SPLIT = 96
# (bits, group size) of a cache's rows that are not quantised.
PLAIN = (16, 0)
# Keys or values of a cache: an array, (codes, scales, biases) as `mx.quantize` makes them, or (codes, scales)
# as `turbo_quantize` does.
Rows = mx.array | Sequence[mx.array]
Outputs = tuple[tuple[mx.array, ...], tuple[mx.array, ...]]
_BOUND: dict[tuple[object, Shape, int, bool], Callable[..., mx.array]] = {}


def decode_attention_reference(
    qkv: mx.array,
    scores: mx.array,
    keys: Rows,
    values: Rows,
    positions: mx.array,
    turns: mx.array,
    *,
    n_heads: int,
    window: int | None,
    mode: str,
    kv_format: tuple[int, int] = PLAIN,
) -> tuple[mx.array, Rows, Rows]:
    """`decode_attention` in mx ops: returns (out, new keys buffers, new values buffers) and changes
    nothing."""
    B, L, _ = qkv.shape
    n_kv_heads, capacity = _arrays(keys)[0].shape[1:3]
    lengths = mx.full((B,), L, dtype=mx.int32)
    q, *rows = qkv_rope_reference(qkv, positions, turns, n_heads=n_heads, n_kv_heads=n_kv_heads)
    new = [
        put_tokens(_arrays(buffer), _encoded(row, kv_format), positions, lengths)
        for buffer, row in zip((keys, values), rows, strict=True)
    ]
    last = positions[:, None, None, None] + L - 1
    # The newest position that has the row of each column.
    key_positions = last - (last - mx.arange(capacity)) % capacity
    query_positions = (positions[:, None] + mx.arange(L))[:, None, :, None]
    seen = (key_positions >= 0) & (key_positions <= query_positions)
    if window is not None:
        seen = seen & (query_positions - key_positions < window)
    # Sums and no matmuls, which some GPUs would do in less than fp32.
    group = n_heads // n_kv_heads
    k, v = (mx.repeat(_decoded(x, kv_format), group, axis=1)[:, :, None] for x in new)
    logits = mx.sum(q.astype(mx.float32)[..., None, :] * k, axis=-1) * q.shape[-1] ** -0.5
    weights = mx.softmax(mx.where(seen, logits, -mx.inf), axis=-1)
    out = mx.sum(weights[..., None] * v, axis=-2).astype(qkv.dtype)
    keys, values = (x if len(x) > 1 else x[0] for x in new)
    return head_gate_reference(out, scores, mode=mode), keys, values


def _arrays(rows: Rows) -> Sequence[mx.array]:
    return (rows,) if isinstance(rows, mx.array) else rows


def _encoded(x: mx.array, kv_format: tuple[int, int]) -> Sequence[mx.array]:
    bits, group_size = kv_format
    if bits == 16:
        return (x,)
    if kv_format == TURBO:
        return turbo_quantize(x)
    # MLX's back ends differ in codes; the kernel's are those of the CPU.
    return mx.quantize(x, group_size=group_size, bits=bits, stream=mx.cpu)


def _decoded(arrays: Sequence[mx.array], kv_format: tuple[int, int]) -> mx.array:
    """In fp32."""
    bits, group_size = kv_format
    if bits == 16:
        return arrays[0].astype(mx.float32)
    if kv_format == TURBO:
        return turbo_dequantize(*arrays)
    codes, scales, biases = arrays
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)


def decode_attention(
    qkv: mx.array,
    scores: mx.array,
    keys: Rows,
    values: Rows,
    positions: mx.array,
    turns: mx.array,
    after: mx.array,
    *,
    n_heads: int,
    window: int | None,
    mode: str,
    most_keys: int,
    kv_format: tuple[int, int] = PLAIN,
    matrix: bool = False,
) -> mx.array:
    """Rotary embedding, append, causal attention over the cache, and the headwise gate, for up to 8 tokens.

    softmax(q kᵀ / sqrt D) v over the cached keys and the new ones up to each token (equations 3 to
    7 of `model`). Up to 640 plain keys one launch does all: for each query head a threadgroup, or two or four
    that all weigh all keys and sum up a part of the values each. Beyond that keys and values are read once
    for up to four query heads of a KV head. Scores, softmax (online, base 2) and sums are fp32; rotated
    queries and keys are rounded to qkv's dtype, as is the result. New keys and values go **in place** to row
    = position modulo capacity; the rule of `qkv_rope_append` holds, with this call as the reader too. A
    quantised cache is decoded in registers, or its codes are factors of products of matrices and the sums
    are scaled; new rows are quantised as `mx.quantize` or `turbo_quantize` does it, and seen so.

    Args:
        qkv: [B, L, (n_heads + 2 n_kv_heads) * D], L <= MAX_TOKENS.
        scores: output of `g_proj` [B, L, n_heads].
        keys, values: [B, n_kv_heads, capacity, D], whole row-contiguous arrays of 8 elements or more, written
            in place. A ring must have capacity >= window + L - 1. Quantised ones are (codes, scales, biases)
            each, or (codes, scales).
        positions: int32 [B], position of the first new token of each row; the rows before it are in the
            cache.
        turns: uint64 [r / 2] from `rope_turns`.
        after: an output of the last kernel that read the buffers; bound, not read.
        window: keys that a token sees, itself included; None for all.
        mode: of the gate, "sigmoid" or "silu".
        most_keys: the largest of `positions`, which sets how many threadgroups share the keys.
        kv_format: of the cache: PLAIN, TURBO, or (bits, group size) of 8 or 4 and of 32, 64 or 128.
        matrix: let the sums over a quantised cache be products of matrices, if it has groups of 64 or 128 and
            qkv is of 16 bits.

    Returns:
        [B, L, n_heads * D] in qkv's dtype.

    Raises:
        RuntimeError: no kernel for these shapes runs here; see `can_decode`.
    """
    B, L, _ = qkv.shape
    KV = _arrays(keys)[0].shape[1]
    D = qkv.shape[2] // (n_heads + 2 * KV)
    shape = Shape(qkv.dtype, B, L, n_heads, KV, D, 2 * turns.size, window, mode, *kv_format, matrix)
    if not can_decode(shape):
        raise RuntimeError("decode_attention: writing in place needs a GPU kernel, and none runs here")
    attend = bind_decode_attention(shape, split_count(most_keys, shape))
    return attend(qkv, scores, keys, values, *rope_table(positions, L, turns), after)


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
    kv_bits: int = 16
    group_size: int = 0
    # Whether the sums over a quantised cache are to be products of matrices, where they can be.
    matrix: bool = False

    @property
    def quantised(self) -> bool:
        return self.kv_bits != 16

    @property
    def turbo(self) -> bool:
        return (self.kv_bits, self.group_size) == TURBO

    @property
    def rows_fit(self) -> bool:
        """Whether a lane's share of a quantised row is whole words or a part of one, all of one group."""
        if self.turbo:
            return self.head_dim in HEAD_DIMS
        values = self.head_dim // 32
        bits = values * self.kv_bits
        words = bits % 32 == 0 or 32 % bits == 0
        return words and self.group_size % values == 0 and self.head_dim % self.group_size == 0

    @property
    def matrix_fits(self) -> bool:
        """Whether products of matrices are wanted and possible; for turbo there is no other way."""
        wanted = self.turbo or (self.matrix and self.quantised)
        blocks = self.head_dim % 64 == 0 and self.group_size % 64 == 0
        return wanted and blocks and self.rows_fit and self.dtype != mx.float32

    @property
    def sums_fit(self) -> bool:
        """Whether each lane can sum up its own share of quantised rows: not of rotated ones."""
        return self.rows_fit and not self.turbo

    @property
    def by_matrix(self) -> bool:
        """Whether they are the way: wanted, possible, and found to work here."""
        return self.matrix_fits and _of_quantised(self, matrix=True).ready(*self.variant)

    @property
    def variant(self) -> tuple[Any, ...]:
        """What a kernel is checked for."""
        group = self.n_heads // self.n_kv_heads
        heads = self.head_dim, self.dims, group, self.window, self.mode, self.n_kv_heads
        return self.dtype, *heads, self.kv_bits, self.group_size

    @property
    def tile(self) -> int:
        """Query heads of a threadgroup, when several share the keys."""
        group = self.n_heads // self.n_kv_heads
        return next(n for n in range(_MOST_HEADS, 0, -1) if group % n == 0)


def bind_decode_attention(shape: Shape, splits: int) -> Callable[..., mx.array]:
    """`decode_attention` as a function of its arrays, for many calls: (qkv, scores, keys, values, positions,
    cos, sin, after), with the three before the last from `rope_table`.

    Args:
        splits: threadgroups that share the keys, from `split_count`.
    """
    by_matrix = shape.by_matrix
    key = (backend_key(), shape, splits, by_matrix)
    if key not in _BOUND:
        _BOUND[key] = _bind(shape, splits, by_matrix)
    return _BOUND[key]


def _bind(shape: Shape, splits: int, matrix: bool, parts: int = 0) -> Callable[..., mx.array]:
    """As `bind_decode_attention`; by products of matrices or not, and with `value_parts` if parts is 0."""
    H, B, L, D = shape.n_heads, shape.batch, shape.length, shape.head_dim
    final = splits == 1 and not shape.quantised
    tile = 1 if final else shape.tile
    simdgroups, keys_at_once = _geometry(shape, tile)
    if matrix:
        simdgroups = MAX_TOKENS
    parts = (parts or value_parts(shape)) if final else 1
    geometry: dict[str, Any] = {
        "grid": (splits * parts * 32 * simdgroups, H // tile, B * L),
        "threadgroup": (32 * simdgroups, 1, 1),
    }
    constants: dict[str, Constant] = {
        "T": shape.dtype,
        "H": H,
        "KV": shape.n_kv_heads,
        "D": D,
        "R": shape.dims,
        "GT": tile,
        "SIMDS": simdgroups,
        "TOKENS": MAX_TOKENS,
        "WINDOW": shape.window or 0,
    }
    if not matrix:
        constants |= {"U": keys_at_once, "SCORES": 1 << (tile * keys_at_once - 1).bit_length()}
    if final:
        whole = _FINAL.bind(
            **geometry,
            constants={**constants, "PARTS": parts, "SILU": shape.mode == "silu"},
            output_shapes=[(B, L, H * D)],
            output_dtypes=[shape.dtype],
        )

        def call_final(
            qkv: mx.array, scores: mx.array, keys: mx.array, values: mx.array, *rest: mx.array
        ) -> mx.array:
            return whole(inputs=[qkv, keys, values, *rest, scores])[0]

        return call_final

    kernel = _ATTENTION
    if shape.quantised:
        constants |= {"BITS": shape.kv_bits, "GROUP": shape.group_size or D}
        kernel = _of_quantised(shape, matrix)
    attention = kernel.bind(
        **geometry,
        constants=constants,
        output_shapes=[(B, H, L, splits, D), (B, H, L, splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    merge = _bind_merge(shape.dtype, (B, H, L, splits, D), shape.mode, shape.turbo)

    def call(qkv: mx.array, scores: mx.array, keys: Rows, values: Rows, *rest: mx.array) -> mx.array:
        parts, stats = attention(inputs=[qkv, *_arrays(keys), *_arrays(values), *rest])
        return merge(inputs=[parts, stats, scores])[0]

    return call


def _of_quantised(shape: Shape, matrix: bool) -> Kernel:
    """The kernel over a quantised cache, by products of matrices or not."""
    if not matrix:
        return _QUANTISED
    return _TURBO if shape.turbo else _MATRIX


def kernel_that_fits(shape: Shape) -> str | None:
    """Name of the kernel that is meant for a quantised cache, works it here or not; None if none is."""
    fits = shape.matrix_fits or shape.sums_fit
    return _of_quantised(shape, shape.matrix_fits).name if fits else None


def _geometry(shape: Shape, tile: int) -> tuple[int, int]:
    """Simdgroups of a threadgroup, at least MAX_TOKENS, and keys whose loads each of them has under way.

    As many as registers allow, of which Metal has half of CUDA's for a thread. On CUDA a launch fails if its
    threads take more than 65,536 together.
    """
    several, wide = tile > 1, shape.dtype == mx.float32 and not shape.quantised
    if backend_name() == "metal":
        return 8, (2 if tile > 2 else 4) // (2 if wide else 1)
    if shape.quantised:
        return 10, 4 if tile > 2 and shape.kv_bits == 8 else 8
    if wide:
        return 8, 2 if several else 4
    # A ring takes a few more registers than 512 threads have, and values that share no word take many.
    few = several and (shape.window is not None or shape.head_dim // 32 % 2 == 1)
    return 12 if few else 16, 4 if several else 8


def value_parts(shape: Shape) -> int:
    """Threadgroups that share the dimensions of a head's values, up to `_MOST_FINAL_KEYS` keys.

    All of them read all keys, but one alone would read more than a core of the GPU gets at once.
    """
    if backend_name() == "metal":
        return 1
    threadgroups, values = shape.n_heads * shape.batch * shape.length, shape.head_dim // 32
    return next(n for n in (4, 2, 1) if n == 1 or (values % n == 0 and threadgroups * n <= _THREADGROUPS))


def _bind_merge(dtype: mx.Dtype, shape: tuple[int, ...], mode: str, turbo: bool = False) -> Launch:
    B, H, L, _, D = shape
    return (_MERGE_TURBO if turbo else _MERGE).bind(
        grid=(32 * _MERGE_SIMDGROUPS, H, B * L),
        threadgroup=(32 * _MERGE_SIMDGROUPS, 1, 1),
        constants={"T": dtype, "H": H, "D": D, "SIMDS": _MERGE_SIMDGROUPS, "SILU": mode == "silu"},
        output_shapes=[(B, L, H * D)],
        output_dtypes=[dtype],
    )


def can_decode(shape: Shape) -> bool:
    """Whether `decode_attention` runs here for heads of this shape, whatever the batch and the length."""
    D = shape.head_dim
    if D % 32 or D > 256:
        return False
    merges = (_MERGE_TURBO if shape.turbo else _MERGE).ready(shape.dtype, D, shape.mode, shape.n_heads)
    if shape.quantised:
        return merges and (shape.by_matrix or (shape.sums_fit and _QUANTISED.ready(*shape.variant)))
    if not _FINAL.ready(*shape.variant, value_parts(shape)):
        return False
    # A window that one threadgroup can do never needs the others.
    return split_count(1 << 30, shape) == 1 or (merges and _ATTENTION.ready(*shape.variant))


def split_count(offset: int, shape: Shape) -> int:
    """Threadgroups that share the cached keys of a token: a power of two, so that few shapes occur.

    Args:
        offset: tokens in the cache, of the longest sequence.
    """
    n_keys = offset if shape.window is None else min(offset, shape.window - 1)
    if n_keys <= _MOST_FINAL_KEYS and not shape.quantised:
        return 1
    others = shape.n_heads // shape.tile * shape.batch * shape.length
    splits = 2
    while splits * 2 <= min(_MOST_SPLITS, _THREADGROUPS // others) and splits * _KEYS_OF_SPLIT < n_keys:
        splits *= 2
    return splits


def _check(
    dtype: mx.Dtype,
    head_dim: int,
    dims: int,
    group: int,
    window: int | None,
    mode: str,
    n_kv_heads: int = 1,
    kv_bits: int = 16,
    group_size: int = 0,
    parts: int = 1,
    *,
    splits: int = 8,
    matrix: bool = False,
) -> Outputs:
    """Two rows of two tokens, in a ring one that has wrapped; reads what was written in place through MLX."""
    n_heads, kv_format = group * n_kv_heads, (kv_bits, group_size)
    shape = Shape(dtype, 2, 2, n_heads, n_kv_heads, head_dim, dims, window, mode, *kv_format)
    capacity = 64 if window is None else window + 8
    positions = mx.array([17, 50 if window is None else 2 * capacity + 3], dtype=mx.int32)
    buffer = (2, n_kv_heads, capacity, head_dim)
    plain = [mx.random.normal(buffer, key=mx.random.key(i)).astype(dtype) for i in (0, 1)]
    keys, values = plain if not shape.quantised else (_encoded(x, kv_format) for x in plain)
    width = (n_heads + 2 * n_kv_heads) * head_dim
    qkv = mx.random.normal((2, 2, width), key=mx.random.key(2)).astype(dtype)
    scores = mx.random.normal((2, 2, n_heads), key=mx.random.key(3)).astype(dtype)
    turns = rope_turns(10_000.0, dims)
    expected = decode_attention_reference(
        qkv,
        scores,
        keys,
        values,
        positions,
        turns,
        n_heads=n_heads,
        window=window,
        mode=mode,
        kv_format=kv_format,
    )
    # What the in-place writes are compared with must be there before them.
    mx.eval(expected)
    attend = _bind(shape, splits, matrix, parts)
    out = attend(qkv, scores, keys, values, *rope_table(positions, 2, turns), qkv)
    mx.eval(out)
    return _comparable(out, keys, values, kv_format), _comparable(*expected, kv_format)


def _comparable(out: mx.array, keys: Rows, values: Rows, kv_format: tuple[int, int]) -> tuple[mx.array, ...]:
    """Quantised results in coarse terms: where a value lies between two codes, either may be taken."""
    if kv_format == PLAIN:
        return out, *_arrays(keys), *_arrays(values)
    decoded = [_decoded(_arrays(x), kv_format) for x in (keys, values)]
    # Weighted, so that it matters where in a row a value is.
    weights = mx.random.uniform(shape=decoded[0].shape[-1:], key=mx.random.key(0))
    rows = [mx.mean(mx.abs(x) * weights, axis=-1) for x in decoded]
    return tuple(x.astype(mx.bfloat16) for x in (out, *rows))


def _check_merge(
    dtype: mx.Dtype, head_dim: int, mode: str, n_heads: int = 3, *, turbo: bool = False
) -> Outputs:
    parts = mx.random.normal((2, n_heads, 5, 4, head_dim), key=mx.random.key(0))
    stats = mx.random.uniform(1, 2, (2, n_heads, 5, 4, 2), key=mx.random.key(1))
    scores = mx.random.normal((2, 5, n_heads), key=mx.random.key(2)).astype(dtype)
    weight = mx.power(2.0, stats[..., :1] - mx.max(stats[..., :1], axis=-2, keepdims=True))
    out = mx.sum(weight * parts, axis=-2) / mx.sum(weight * stats[..., 1:], axis=-2)
    if turbo:
        out = mx.sum(out[..., None] * rotation(head_dim), axis=-2)
    ours = _bind_merge(dtype, parts.shape, mode, turbo)(inputs=[parts, stats, scores])[0]
    return (ours,), (head_gate_reference(out.astype(dtype), scores, mode=mode),)


_AFTER_ROWS = ["positions", "cosines", "sines", "after"]
_PLAIN_INPUTS = ["qkv", "keys", "values", *_AFTER_ROWS]
_ATTENTION = Kernel(
    "decode_attention",
    inputs=_PLAIN_INPUTS,
    outputs=["parts", "stats"],
    headers=["common", "kv_plain"],
    check=_check,
)
_FINAL = Kernel(
    "decode_attention",
    variant="decode_attention_final",
    inputs=[*_PLAIN_INPUTS, "scores"],
    outputs=["out"],
    headers=["common", "kv_plain", "gate"],
    defines=["FINAL"],
    check=partial(_check, splits=1),
)
_QUANTISED = Kernel(
    "decode_attention",
    variant="decode_attention_quantised",
    inputs=[
        "qkv",
        *(part for rows in ("key", "value") for part in (f"{rows}s", f"{rows}_scales", f"{rows}_biases")),
        *_AFTER_ROWS,
    ],
    outputs=["parts", "stats"],
    headers=["common", "kv_codes"],
    defines=["CODES"],
    check=_check,
)
_MATRIX = Kernel(
    "decode_attention_matrix",
    inputs=_QUANTISED.inputs,
    outputs=["parts", "stats"],
    headers=["common", "kv_codes", "matrix"],
    defines=["CODES"],
    check=partial(_check, matrix=True),
)
_TURBO = Kernel(
    "decode_attention_matrix",
    variant="decode_attention_turbo",
    inputs=["qkv", "keys", "key_scales", "values", "value_scales", *_AFTER_ROWS],
    outputs=["parts", "stats"],
    headers=["common", "turbo", "matrix"],
    defines=["TURBO"],
    check=partial(_check, matrix=True),
)
_MERGE = Kernel(
    "merge_gate",
    inputs=["parts", "stats", "scores"],
    outputs=["out"],
    headers=["common", "gate"],
    check=_check_merge,
)
_MERGE_TURBO = Kernel(
    "merge_gate",
    variant="merge_gate_turbo",
    inputs=["parts", "stats", "scores"],
    outputs=["out"],
    headers=["common", "gate", "turbo"],
    defines=["TURBO"],
    check=partial(_check_merge, turbo=True),
)
