"""What all layer caches share: buffers with one row a token, who may write into them, and rows of a batch.

Buffers are written in two ways. `append` is functional: it makes new array values, and whoever holds an old
one keeps it. `reserve` and `commit` are for kernels that write into a buffer's memory, which MLX does not
see. Hence two rules. Before buffers are read as values, a pending write is made to happen (`sync`). Before
they are written in place, MLX is asked for memory that no other array and no unevaluated operation holds; it
copies if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import mlx.core as mx

# Keys and values as attention takes them: arrays, or (packed, scales, biases) of a quantised cache. Kernels
# take (codes, scales) of a turbo cache, too.
KV = tuple[Any, Any]

UNLIMITED = sys.maxsize
# Growth of a buffer: a quarter more rows than needed, but not more than the limit, in steps of _STEP.
_STEP = 256
_MOST_SPARE_ROWS = 16384


class LayerCache:
    """Keys and values of one layer for one sequence or a batch of sequences of different lengths.

    Every buffer is [B, KV, rows, ...]. Row counts and positions are host integers. The lists of per-sequence
    integers are replaced, never changed, so that copies may share them.

    Attributes:
        offsets: tokens held by each sequence; the next token of sequence i is at position offsets[i].
    """

    # Rows of buffers for kernels: MLX does not let Metal write into arrays of fewer than 8 elements.
    _LEAST_ROWS: ClassVar[int] = 1
    # Lists with one entry a sequence.
    _PER_SEQUENCE: ClassVar[tuple[str, ...]] = ("offsets", "_budget")
    # (bits, group size) of the rows; 16 bits stand for plain values of any dtype.
    kv_format: tuple[int, int] = (16, 0)
    # Tokens that can always be trimmed.
    slack: int = UNLIMITED
    # Attributes that caches of one batch must agree in.
    _KIND: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.offsets: list[int] = [0]
        # Tokens that a sequence still takes before the rest of what is appended is padding.
        self._budget: list[int] = [UNLIMITED]
        self._buffers: list[mx.array] = []
        self._last: mx.array | None = None
        # Whether other arrays or unevaluated operations may hold the buffers.
        self._shared = False

    # What a kind of cache defines.

    @property
    def _limit(self) -> int:
        """Rows that the buffers never exceed."""
        return UNLIMITED

    def _encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """What is stored for keys and values [B, KV, L, D]: arrays [B, KV, L, ...], one a buffer."""
        return [keys, values]

    def _decode(self, arrays: list[mx.array]) -> KV:
        """Keys and values of such arrays, as kernels take them."""
        return arrays[0], arrays[1]

    def _seen(self, arrays: list[mx.array]) -> KV:
        """Keys and values of such arrays, as MLX's attention takes them."""
        return self._decode(arrays)

    def _layout(self) -> tuple[int, int, mx.Dtype]:
        """Heads, width and dtype of the keys that were stored."""
        return _kind(self._buffers[0])

    def _store(self, rows: list[mx.array], valid: list[int]) -> list[mx.array]:
        """Write rows into the buffers, as new values, and return what the new queries may see."""
        raise NotImplementedError

    def can_trim(self, n: int) -> bool:
        """Whether `trim(n)` can be exact."""
        raise NotImplementedError

    def mask(self, length: int) -> mx.array | str | None:
        """For each of the next `length` queries, which of the keys that `append` will return it sees."""
        raise NotImplementedError

    # Positions.

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int for one sequence, int32 [B] for a batch."""
        return self.offsets[0] if len(self.offsets) == 1 else mx.array(self.offsets, dtype=mx.int32)

    @property
    def capacity(self) -> int:
        """Rows of the buffers now."""
        return self._buffers[0].shape[2] if self._buffers else 0

    def valid(self, length: int) -> list[int]:
        """How many of the next `length` tokens of each sequence are tokens; the rest is padding.

        Raises:
            ValueError: none is, because `finalize` was forgotten.
        """
        valid = [min(length, budget) for budget in self._budget]
        if length > 0 and not any(valid):
            raise ValueError("all tokens of `lengths` are in; call finalize() before appending more")
        return valid

    def size(self) -> int:
        """Tokens held of the longest sequence."""
        return min(max(self.offsets), self._limit)

    def empty(self) -> bool:
        return not any(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of everything held."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def token_bytes(self, n_kv_heads: int, head_dim: int, dtype: mx.Dtype) -> int:
        """Bytes that the keys and values of one token take."""
        token = mx.zeros((1, n_kv_heads, 1, head_dim), dtype)
        return sum(x.nbytes for x in self._encode(token, token))

    # Writing.

    def append(self, keys: mx.array, values: mx.array) -> KV:
        """Take in the next tokens and return all that their queries may see; `mask` says which sees what.

        What is returned may be a view of the buffers. It must have been used, as an operand at least of what
        the next kernel that writes in place depends on, by then.

        Args:
            keys, values: [B, KV, L, D], keys rotated.

        Returns:
            keys, values: [B, KV, n, D].

        Raises:
            ValueError: the arrays do not fit those that the cache holds.
        """
        length = keys.shape[2]
        if length == 0:
            raise ValueError("there is nothing to append: keys have length 0")
        rows = self._encode(keys, values)
        self._admit(rows)
        valid = self.valid(length)
        self._fit(max(self.offsets) + length, rows)
        seen = self._store(rows, valid)
        self._advance(valid)
        return self._seen(seen)

    def reserve(
        self, length: int, *, shape: tuple[int, int, int] | None = None, dtype: mx.Dtype | None = None
    ) -> KV:
        """The whole buffers with room for `length` more tokens, for a kernel that writes into their memory.

        The kernel writes tokens valid(length)[i] of sequence i at positions offsets[i], ...; `commit` must
        follow. The buffers are row contiguous and no other array shares their memory.

        Args:
            length: tokens that will be written.
            shape: (B, KV, D) of the keys; needed as long as the cache has no buffers.
            dtype: dtype of keys and values; needed as long as the cache has no buffers.

        Raises:
            ValueError: the cache has no buffers, and shape or dtype is missing; or the buffers are of others.
        """
        layout = self._buffers
        if not layout:
            if shape is None or dtype is None:
                raise ValueError("the cache has no buffers yet: reserve needs shape=(B, KV, D) and dtype")
            token = mx.zeros((*shape[:2], 1, shape[2]), dtype)
            layout = self._encode(token, token)
            self._admit(layout)
        elif shape is not None:
            held = len(self.offsets), *self._layout()
            if held != (*shape, dtype):
                raise ValueError(
                    f"the cache holds (sequences, heads, width, dtype) {held}, not {(*shape, dtype)}"
                )
        self._fit(max(max(self.offsets) + length, self._LEAST_ROWS), layout)
        if self._shared:
            # A sequence that gets a token has a row that is free for it.
            self._unshare(next(i for i, n in enumerate(self.valid(length)) if n))
        return self._decode(self._buffers)

    def commit(self, length: int, last: mx.array) -> None:
        """Count `length` tokens that a kernel has written or, once `last` is evaluated, will have written.

        Args:
            length: as in `reserve`.
            last: an output of the last kernel that writes or reads the buffers for these tokens.
        """
        valid = self.valid(length)
        self._last = last
        self._advance(valid)

    @property
    def last(self) -> mx.array | None:
        """What the next kernel that writes in place binds as an input, to run after the earlier ones.

        None when nothing is pending.
        """
        return self._last

    def sync(self) -> None:
        """Wait for pending in-place writes."""
        if self._last is not None:
            mx.eval(self._last)
            self._last = None

    def _values(self) -> list[mx.array]:
        """The buffers, to be read as values: every read but a kernel's own goes through here."""
        self.sync()
        self._shared = True
        return self._buffers

    def _unshare(self, sequence: int) -> None:
        """Make the buffers this cache's own.

        An update of one row is donated the buffer if nobody else holds it, and copies it otherwise. The row
        is the sequence's next one.
        """
        slot = self.offsets[sequence] % self._limit
        zeros = [mx.zeros((1, x.shape[1], 1, x.shape[3]), x.dtype) for x in self._buffers]
        pairs = zip(self._values(), zeros, strict=True)
        self._buffers = [put_rows(x, zero, slot, sequence) for x, zero in pairs]
        self._shared = False

    def _admit(self, rows: Sequence[mx.array]) -> None:
        """Check that arrays fit the buffers; a fresh cache takes on their number of sequences."""
        if len({row.shape[:3] for row in rows}) > 1:
            raise ValueError(f"keys and values are not of the same tokens: {[row.shape[:3] for row in rows]}")
        for buffer, row in zip(self._buffers, rows, strict=False):
            if _kind(buffer) != _kind(row):
                raise ValueError(f"the cache holds (heads, width, dtype) {_kind(buffer)}, not {_kind(row)}")
        batch = rows[0].shape[0]
        if len(self.offsets) == 1 and not self._buffers:
            self._repeat(batch)
        if batch != len(self.offsets):
            raise ValueError(f"the cache holds {len(self.offsets)} sequences; keys and values have {batch}")

    def _repeat(self, batch: int) -> None:
        for name in self._PER_SEQUENCE:
            setattr(self, name, getattr(self, name) * batch)

    def _fit(self, tokens: int, layout: Sequence[mx.array]) -> None:
        """Make room for positions below `tokens`; layout: arrays [B, KV, _, ...], one a buffer."""
        needed = min(tokens, self._limit)
        if needed <= self.capacity:
            return
        target = self._roomy(needed)
        if self._buffers:
            self._buffers = [_with_rows(buffer, target) for buffer in self._values()]
        else:
            self._buffers = [mx.zeros((*x.shape[:2], target, x.shape[3]), x.dtype) for x in layout]

    def _roomy(self, rows: int) -> int:
        wanted = rows + min(rows // 4, _MOST_SPARE_ROWS)
        return min(self._limit, -(-wanted // _STEP) * _STEP)

    def _advance(self, valid: list[int]) -> None:
        if self._budget == [UNLIMITED]:
            self.offsets = [self.offsets[0] + valid[0]]
            return
        self.offsets = [offset + n for offset, n in zip(self.offsets, valid, strict=True)]
        self._budget = [b if b == UNLIMITED else b - n for b, n in zip(self._budget, valid, strict=True)]

    # Going back.

    def is_trimmable(self) -> bool:
        """Whether anything can be trimmed now; an empty cache counts."""
        return self.empty() or self.can_trim(1)

    def trim(self, n: int) -> int:
        """Take the last n tokens off every sequence, exactly.

        Returns:
            Tokens taken off: n, or the length of the shortest sequence if that is less.

        Raises:
            ValueError: that cannot be done; nothing has changed.
        """
        if n < 0:
            raise ValueError(f"cannot trim {n} tokens; the number must not be negative")
        n = min(n, *self.offsets)
        if not self.can_trim(n):
            raise ValueError(self.trim_error(n))
        if n:
            self._rewind([offset - n for offset in self.offsets])
        return n

    def trim_error(self, n: int) -> str:
        """Why `trim(n)` cannot be exact, and what is possible."""
        raise NotImplementedError

    def _rewind(self, offsets: list[int]) -> None:
        self.offsets = offsets

    # Copies and files.

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = copy = self.copy()
        return copy

    def __copy__(self) -> Self:
        return self.copy()

    def copy(self) -> Self:
        """An independent cache; the buffers are shared until one of the two writes."""
        self._values()
        copy = self.__class__.__new__(self.__class__)
        vars(copy).update(vars(self))
        for name in self._PER_SEQUENCE:
            setattr(copy, name, list(getattr(self, name)))
        return copy

    @property
    def state(self) -> tuple[Any, ...]:
        """All that defines the cache: buffers (None if empty), offsets and what the kind of cache adds."""
        rows = min(max(self.offsets), self._limit)
        buffers = [buffer[:, :, :rows] for buffer in self._values()] if rows else None
        return buffers or None, mx.array(self.offsets, dtype=mx.int32), *self._more_state()

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        buffers, offsets, *more = state
        LayerCache.__init__(self)
        self.offsets = offsets.tolist()
        self.finalize()
        # What is loaded belongs to the caller.
        self._shared = True
        self._buffers = [mx.contiguous(buffer) for buffer in buffers] if buffers is not None else []
        self._set_more_state(more)

    def _more_state(self) -> tuple[Any, ...]:
        return ()

    def _set_more_state(self, more: Sequence[Any]) -> None:
        pass

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Self:
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    # Batches.

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say that the tokens appended until `finalize` are padded on the right.

        Args:
            left_padding: not supported.
            lengths: tokens of each sequence; what is appended after them is padding, and not kept.
            right_padding: the padding of each sequence; it follows from lengths and is not read.

        Raises:
            ValueError: padding on the left, or no lengths, or not one for each sequence.
        """
        if left_padding is not None and any(left_padding):
            raise ValueError("padding on the left is not supported; pad on the right and give lengths")
        if lengths is None:
            if right_padding is not None and any(right_padding):
                raise ValueError("right_padding needs lengths: the tokens of each sequence")
            return
        if len(self.offsets) == 1 and not self._buffers:
            self._repeat(len(lengths))
        if len(lengths) != len(self.offsets):
            raise ValueError(f"the cache holds {len(self.offsets)} sequences; lengths has {len(lengths)}")
        self._budget = [int(length) for length in lengths]

    def finalize(self) -> None:
        """End what `prepare` began."""
        self._budget = [UNLIMITED] * len(self.offsets)

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        """One cache with the sequences of all, in order; none of them changes.

        Raises:
            ValueError: they are not of one kind and shape.
        """
        filled = [cache for cache in caches if cache._buffers and not cache.empty()]
        model = filled[0] if filled else caches[0]
        for cache in caches:
            model._check_mergeable(cache)
        merged = caches[0].copy()
        if len(caches) == 1:
            return merged
        for name in cls._PER_SEQUENCE:
            setattr(merged, name, [entry for cache in caches for entry in getattr(cache, name)])
        rows = min(max(merged.offsets), merged._limit)
        parts = [cache._stacked(rows, model._buffers) for cache in caches] if filled else []
        merged._buffers = [mx.concatenate(list(x), axis=0) for x in zip(*parts, strict=True)]
        return merged

    def extend(self, other: Self) -> None:
        """Add the other cache's sequences after these."""
        self._become(self.merge([self, other]))

    def filter(self, indices: Iterable[int]) -> None:
        """Keep only the sequences at these indices, in this order."""
        self._become(self._select([int(index) for index in indices]))

    def extract(self, index: int) -> Self:
        """A cache of one sequence."""
        return self._select([index])

    def _select(self, indices: list[int]) -> Self:
        if not indices:
            raise ValueError("a cache keeps at least one sequence; drop the cache instead")
        selected = self.copy()
        if indices == list(range(len(self.offsets))):
            return selected
        for name in self._PER_SEQUENCE:
            entries = getattr(self, name)
            setattr(selected, name, [entries[i] for i in indices])
        needed = min(max(selected.offsets), self._limit)
        rows = min(self.capacity, self._roomy(needed))
        which = mx.array(indices)
        selected._buffers = [mx.take(x[:, :, :rows], which, axis=0) for x in self._buffers] if needed else []
        return selected

    def _stacked(self, rows: int, layout: Sequence[mx.array]) -> list[mx.array]:
        """The buffers with so many rows; zeros when the cache is empty."""
        if self.empty() or not self._buffers:
            batch = len(self.offsets)
            return [mx.zeros((batch, x.shape[1], rows, x.shape[3]), x.dtype) for x in layout]
        return [_with_rows(buffer, rows) for buffer in self._values()]

    def _check_mergeable(self, other: LayerCache) -> None:
        if type(self) is not type(other):
            raise ValueError(f"cannot batch {type(self).__name__} with {type(other).__name__}")
        for name in self._KIND:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"cannot batch caches of different {name}: {mine} and {theirs}")
        for a, b in zip(self._buffers, other._buffers, strict=False):
            if _kind(a) != _kind(b):
                raise ValueError(f"cannot batch caches of (heads, width, dtype) {_kind(a)} and {_kind(b)}")

    def _become(self, other: Self) -> None:
        vars(self).update(vars(other))


def for_batch(entries: list[int], batch: int) -> list[int]:
    """One entry a sequence, of a list that a cache has: a fresh one does not know the batch yet."""
    return entries if len(entries) == batch else entries * batch


def _kind(x: mx.array) -> tuple[int, int, mx.Dtype]:
    return x.shape[1], x.shape[3], x.dtype


def put_rows(buffer: mx.array, rows: mx.array, start: int, sequence: int = 0) -> mx.array:
    """The buffer [B, KV, n, D] with other rows [b, KV, m, D] from `start` on in sequences `sequence`, ...

    The result is a new value; the buffer's memory is reused if nobody else holds it.
    """
    if rows.shape == buffer.shape:
        # An assignment to all items would make the rows themselves, strides and all, the buffer.
        return mx.pad(rows, [(0, 0)] * rows.ndim)
    # A new handle of the same value: assignment to items rebinds the handle, and others may hold the old one.
    updated = buffer[...]
    updated[sequence : sequence + rows.shape[0], :, start : start + rows.shape[2]] = rows
    return updated


def _with_rows(buffer: mx.array, rows: int) -> mx.array:
    """The buffer cut or padded with zeros to so many rows."""
    have = buffer.shape[2]
    if have >= rows:
        return buffer[:, :, :rows]
    return mx.pad(buffer, [(0, 0), (0, 0), (0, rows - have), (0, 0)])
