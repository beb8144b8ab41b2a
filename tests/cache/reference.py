"""What caches must do, said with plain lists of tokens, and the ways in which tests write in place.

Every token has a tag, and its keys and values are made from the tag alone, so that any mix-up of positions,
heads, sequences or caches shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.cache import LayerCache, QuantizedFullKVCache, SlidingKVCache, TurboFullKVCache, storage
from spark25_mlx.custom_kernels.backend import REFERENCE
from spark25_mlx.custom_kernels.qkv_rope import qkv_rope_append
from spark25_mlx.custom_kernels.turbo import turbo_quantize
from tests.kernels.backends import GPU, Backend

KV, D = 2, 32
STAND_IN = Backend(REFERENCE)
_PADDING_TAG = 100_000


def keys_of(tags: Any) -> np.ndarray:
    """fp32 [B, KV, n, D] for tags [B, n], or [KV, n, D] for tags [n]: exact integers below 2 ** 24."""
    tags = np.asarray(tags)
    heads = np.arange(KV)[:, None, None] * D + np.arange(D)
    return (tags[..., None, :, None] * (KV * D) + heads).astype(np.float32)


def values_of(tags: Any) -> np.ndarray:
    return -keys_of(tags)


def tags_of(keys: np.ndarray) -> np.ndarray:
    """Tags [n] of keys [KV, n, D], after a check that they are whole keys of those tags."""
    tags = keys[0, :, 0].astype(np.int64) // (KV * D)
    np.testing.assert_array_equal(keys, keys_of(tags))
    return tags


def stored(cache: LayerCache, tags: Any) -> list[np.ndarray]:
    """What the buffers of a cache hold for tags [B, n]: arrays [B, KV, n, ...]."""
    arrays = [keys_of(tags), values_of(tags)]
    if isinstance(cache, TurboFullKVCache):
        return [np.array(part) for x in arrays for part in turbo_quantize(mx.array(x))]
    if not isinstance(cache, QuantizedFullKVCache):
        return arrays
    quantize = partial(mx.quantize, group_size=cache.group_size, bits=cache.bits)
    return [np.array(part) for x in arrays for part in quantize(mx.array(x))]


def flat(pair: Any) -> list[mx.array]:
    """The arrays of a (keys, values) pair, quantised or not."""
    return [x for part in pair for x in (part if isinstance(part, tuple) else (part,))]


@dataclass
class Sequence_:
    """One sequence: its tokens, and what a ring of `window + slack` rows holds after all that was written."""

    window: int
    slack: int
    tags: np.ndarray
    ring: np.ndarray

    @classmethod
    def fresh(cls, window: int, slack: int) -> Sequence_:
        return cls(window, slack, np.zeros(0, np.int64), np.zeros(window + slack, np.int64))

    def copy(self) -> Sequence_:
        return Sequence_(self.window, self.slack, self.tags.copy(), self.ring.copy())

    def write(self, tags: np.ndarray) -> None:
        start = len(self.tags)
        self.tags = np.concatenate([self.tags, tags])
        self._put(range(start, len(self.tags)))

    def can_trim(self, n: int) -> bool:
        """Whether all keys are there that the next query sees after the last n tokens are gone."""
        end = len(self.tags) - n
        seen = np.arange(max(0, end - self.window + 1), end)
        return end == 0 or np.array_equal(self.ring[seen % len(self.ring)], self.tags[seen])

    def trim(self, n: int) -> None:
        self.tags = self.tags[: len(self.tags) - n]

    def rebuild(self, tags: np.ndarray, held: int) -> None:
        """Only the last `held` of these tokens are in the ring."""
        self.tags = tags.copy()
        self.ring = np.zeros(len(self.ring), np.int64)
        self._put(range(len(tags) - held, len(tags)))

    def seen_from(self, position: int, window: int | None) -> np.ndarray:
        """Tags that the query at a position sees; window None for all."""
        first = 0 if window is None else max(0, position - window + 1)
        return self.tags[first : position + 1]

    def _put(self, positions: range) -> None:
        newest = np.array(positions[-len(self.ring) :], dtype=np.int64)
        self.ring[newest % len(self.ring)] = self.tags[newest]


def new_tags(sequences: Sequence[Sequence_], length: int, valid: Sequence[int], first: int) -> np.ndarray:
    """Fresh tags [B, length]; behind the valid ones stand those of padding."""
    tags = np.arange(first, first + len(sequences) * length).reshape(len(sequences), length)
    padding = np.arange(length) >= np.asarray(valid)[:, None]
    return np.where(padding, _PADDING_TAG + np.arange(length), tags)


def check_append(
    cache: LayerCache, sequences: Sequence[Sequence_], tags: np.ndarray, valid: Sequence[int]
) -> None:
    """Append tokens [B, L], and compare what each query sees with the sequences, which hold them already."""
    length = tags.shape[1]
    before = cache.offsets
    mask = cache.mask(length)
    assert cache.valid(length) == list(valid)
    arrays = [np.array(x) for x in flat(cache.append(mx.array(keys_of(tags)), mx.array(values_of(tags))))]
    n = arrays[0].shape[2]
    visible = visible_columns(mask, len(sequences), length, n)
    for i, sequence in enumerate(sequences):
        assert cache.offsets[i] == len(sequence.tags)
        if not valid[i]:
            continue
        queries = sorted({0, valid[i] // 3, valid[i] - 1} if valid[i] > 12 else range(valid[i]))
        columns = np.flatnonzero(visible[i, queries].any(axis=0))
        if isinstance(cache, SlidingKVCache):
            held = np.full(n, -1)
            held[columns] = tags_of(arrays[0][i][:, columns])
            window: int | None = cache.window
        else:
            # Here row = position.
            assert columns[-1] < len(sequence.tags)
            held, window = sequence.tags, None
        expected = stored(cache, held[columns][None])
        for got, want in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(got[i][:, columns], want[0])
        for query in queries:
            seen = held[np.flatnonzero(visible[i, query])]
            want = sequence.seen_from(before[i] + query, window)
            np.testing.assert_array_equal(np.sort(seen), np.sort(want))


def visible_columns(mask: Any, batch: int, length: int, n: int) -> np.ndarray:
    """A mask in any of its forms as bool [B, length, n]."""
    if mask is None:
        assert length == 1
        return np.ones((batch, length, n), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.broadcast_to(np.tril(np.ones((length, n), bool), n - length), (batch, length, n))
    array = np.array(mask)
    assert array.dtype == bool
    if array.ndim == 4:
        array = array[:, 0]
    assert array.shape[-2:] == (length, n)
    return np.broadcast_to(array, (batch, length, n))


class KernelWrites:
    """Writes tokens into the memory of a cache's buffers behind MLX's back, as kernels do, and as late.

    A write happens when its output, the `last` of the commit, is evaluated, after those whose output it took.

    - gpu: `last` is the output of the project's kernel, so MLX itself sees to that. No kernel writes
      quantised buffers: their tokens are appended as values.
    - simulator: it would run the kernel at the call, so the call is put off until the caches evaluate `last`,
      of which `evaluated` is told. Quantised buffers are written as by the reference.
    - reference: numpy assigns to the memory, put off likewise.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # By id of `last`: itself, the `last` before, and what writes.
        self._pending: dict[int, tuple[mx.array, mx.array | None, Callable[[], object]]] = {}

    def write(self, cache: LayerCache, tags: np.ndarray) -> None:
        """Append tokens [B, L] in place."""
        length = tags.shape[1]
        is_quantised = isinstance(cache, QuantizedFullKVCache | TurboFullKVCache)
        if is_quantised and self._backend.name == GPU:
            cache.append(mx.array(keys_of(tags)), mx.array(values_of(tags)))
            return
        buffers = flat(cache.reserve(length, shape=(tags.shape[0], KV, D), dtype=mx.float32))
        valid, after = cache.valid(length), cache.last
        if self._backend.name == GPU:
            cache.commit(length, self._launch(buffers, tags, cache.offsets, valid, after))
            return
        put: Callable[[], object]
        if is_quantised or self._backend.is_reference:
            put = partial(_assign, buffers, stored(cache, tags), _slots(cache, valid))
        else:
            put = partial(self._launch, buffers, tags, cache.offsets, valid, after)
        last = mx.zeros(1)
        self._pending[id(last)] = last, after, put
        cache.commit(length, last)

    def evaluated(self, array: Any) -> None:
        """Do the writes that an evaluated array depends on."""
        pending = self._pending.pop(id(array), None)
        if pending is None:
            return
        _, before, put = pending
        self.evaluated(before)
        put()

    def _launch(
        self,
        buffers: list[mx.array],
        tags: np.ndarray,
        positions: list[int],
        valid: list[int],
        after: mx.array | None,
    ) -> mx.array:
        """The kernel's output. It rotates by no turns, which leaves every key as it is."""
        keys, values = buffers
        heads = [np.zeros((len(tags), 1, tags.shape[1], D), np.float32), keys_of(tags), values_of(tags)]
        qkv = mx.array(np.concatenate(heads, axis=1).transpose(0, 2, 1, 3).reshape(*tags.shape, -1))
        with self._backend.writing():
            return qkv_rope_append(
                qkv,
                keys,
                values,
                mx.array(positions, dtype=mx.int32),
                mx.array(valid, dtype=mx.int32),
                mx.zeros(D // 2, dtype=mx.uint64),
                qkv if after is None else after,
                n_heads=1,
                n_kv_heads=KV,
            )


def _slots(cache: LayerCache, valid: list[int]) -> list[np.ndarray]:
    """Rows of the buffers for the next valid tokens of each sequence."""
    slots = [np.arange(o, o + v) for o, v in zip(cache.offsets, valid, strict=True)]
    if isinstance(cache, SlidingKVCache):
        slots = [s % (cache.window + cache.slack) for s in slots]
    return slots


def _assign(buffers: list[mx.array], rows: list[np.ndarray], slots: list[np.ndarray]) -> None:
    """Write the first of the rows [B, KV, L, ...] of each sequence into its slots of the buffers' memory."""
    for buffer, new in zip(buffers, rows, strict=True):
        mx.eval(buffer)
        memory = np.array(buffer, copy=False)
        assert memory.flags.c_contiguous and memory.flags.writeable
        for i, own in enumerate(slots):
            memory[i][:, own] = new[i][:, : len(own)]


@contextmanager
def kernel_writes(backend: Backend = STAND_IN) -> Iterator[KernelWrites]:
    """Writes by a back end, the reference unless said. For all but a GPU, while it lasts, MLX runs on the CPU
    and caches that evaluate a commit's `last` make the write happen."""
    writes = KernelWrites(backend)
    if backend.name == GPU:
        yield writes
        return

    def evaluate(*arrays: Any) -> None:
        for array in arrays:
            writes.evaluated(array)
        mx.eval(*arrays)

    # Numpy and the simulator reach only the CPU's memory.
    with mx.stream(mx.cpu), pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "mx", SimpleNamespace(**{**vars(mx), "eval": evaluate}))
        yield writes
