"""Cache of a layer that attends to a window of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from .snapshot import Snapshot, SnapshotPolicy
from .storage import KV, LayerCache, put_rows


class SlidingKVCache(LayerCache):
    """The last window + slack keys and values of a layer, in a ring: row = position mod (window + slack).

    Keys are stored rotated, so their order does not matter. A query at position p sees positions p - window +
    1 to p. The slack keeps older rows from being overwritten for a while: `slack` tokens, at least, can be
    trimmed at any time. Before the ring is full its buffers may be smaller; then row = position.

    Args:
        window: keys that a query sees, its own included.
        slack: rows beyond the window.
        policy: when to keep snapshots; None for never.

    Attributes:
        snapshots: those that the policy has kept of each sequence, in order of position.
    """

    _PER_SEQUENCE: ClassVar[tuple[str, ...]] = (*LayerCache._PER_SEQUENCE, "_lows", "snapshots")
    _KIND: ClassVar[tuple[str, ...]] = ("window", "slack")

    def __init__(self, window: int, slack: int = 64, policy: SnapshotPolicy | None = None) -> None:
        if window < 1 or slack < 0:
            raise ValueError(f"window is {window} and slack {slack}; they must be at least 1 and 0")
        super().__init__()
        self._set_ring(window, slack)
        self.policy = policy

    def _set_ring(self, window: int, slack: int) -> None:
        self.window = window
        self.slack = slack
        # Positions from here on have not been overwritten.
        self._lows: list[int] = [0] * len(self.offsets)
        self.snapshots: list[tuple[Snapshot, ...]] = [()] * len(self.offsets)
        self._marks: list[list[int]] = []

    @property
    def _limit(self) -> int:
        return self.window + self.slack

    @property
    def history(self) -> list[int]:
        """For each sequence, the tokens in the cache that the next query sees: min(offset, window - 1)."""
        return [min(offset, self.window - 1) for offset in self.offsets]

    # Writing.

    def append(self, keys: mx.array, values: mx.array) -> KV:
        """Take in the next tokens and return all that their queries may see; `mask` says which sees what.

        Args:
            keys, values: [B, KV, L, D], keys rotated. L may exceed the window and the ring.

        Returns:
            keys, values, for L == 1: the ring, or its first rows up to the longest sequence's end.
            For L > 1: [B, KV, m + L, D] with m = max(history). First the tokens before, each sequence's last
            one right before its new ones, then the new ones. Where a sequence has fewer than m tokens before,
            the left is filled with rows that mean nothing and that `mask` hides.

        Raises:
            ValueError: the arrays do not fit those that the cache holds.
        """
        return super().append(keys, values)

    def mask(self, length: int) -> mx.array | str | None:
        """For each of the next `length` queries, which of the keys that `append` will return it sees.

        Returns:
            None (all), "causal" (query i sees all but the last length - 1 - i keys), or bool: [length, n] or,
            where the sequences differ, [B, 1, length, n].
        """
        return self._ring_mask() if length == 1 else self._chunk_mask(length)

    def _ring_mask(self) -> mx.array | None:
        n = min(max(self.offsets) + 1, self._limit)
        rows = mx.arange(n)
        if len(set(self.offsets)) == 1:
            # Rows in use are those that the query sees, if there are not more of them than the window has.
            if n <= self.window:
                return None
            return ((self.offsets[0] - rows) % self._limit < self.window)[None]
        query = mx.array(self.offsets)[:, None, None, None]
        return (query - rows) % self._limit < mx.minimum(self.window, query + 1)

    def _chunk_mask(self, length: int) -> mx.array | str:
        history = self.history
        before = max(history)
        if len(set(history)) == 1 and before + length <= self.window:
            return "causal"
        columns = mx.arange(before + length)
        queries = mx.arange(before, before + length)[:, None]
        mask = (columns <= queries) & (queries - columns < self.window)
        if len(set(history)) == 1:
            return mask
        return mask & (columns >= before - mx.array(history)[:, None, None, None])

    def _store(self, rows: list[mx.array], valid: list[int]) -> list[mx.array]:
        after = [offset + n for offset, n in zip(self.offsets, valid, strict=True)]
        if rows[0].shape[2] == 1:
            self._write_ring(rows, valid)
            self._keep(self.offsets, after, self._values, self._ring_row)
            n = min(max(self.offsets) + 1, self._limit)
            return [buffer[:, :, :n] for buffer in self._buffers]
        before = max(self.history)
        seen = self._with_history(rows, before)
        first = [offset - before for offset in self.offsets]
        self._keep(self.offsets, after, lambda: seen, lambda sequence, position: position - first[sequence])
        self._write_ring(rows, valid)
        return seen

    def _ring_row(self, sequence: int, position: int) -> int:
        return position % self._limit

    def _with_history(self, rows: list[mx.array], before: int) -> list[mx.array]:
        """Rows [B, KV, L, D] with the `before` tokens in front of them."""
        if before == 0:
            return rows
        buffers = self._values()
        if len(set(self.offsets)) == 1:
            start = (self.offsets[0] - before) % self._limit
            first = min(before, self._limit - start)
            return [
                mx.concatenate([x[:, :, start : start + first], x[:, :, : before - first], new], axis=2)
                for x, new in zip(buffers, rows, strict=True)
            ]
        positions = mx.array(self.offsets)[:, None] + mx.arange(-before, 0)
        where = (mx.maximum(positions, 0) % self._limit)[:, None, :, None]
        return [
            mx.concatenate([mx.take_along_axis(x, where, axis=2), new], axis=2)
            for x, new in zip(buffers, rows, strict=True)
        ]

    def _write_ring(self, rows: list[mx.array], valid: list[int]) -> None:
        """Put the last valid rows into the ring, and nothing of what follows them."""
        buffers = self._values()
        pairs = zip(buffers, rows, strict=True)
        if len(set(self.offsets)) == 1 and len(set(valid)) == 1:
            n = min(valid[0], self._limit)
            start = (self.offsets[0] + valid[0] - n) % self._limit
            first = min(n, self._limit - start)
            tail = [x[:, :, valid[0] - n : valid[0]] for x in rows]
            buffers = [put_rows(x, new[:, :, :first], start) for x, new in zip(buffers, tail, strict=True)]
            if n > first:
                buffers = [put_rows(x, new[:, :, first:], 0) for x, new in zip(buffers, tail, strict=True)]
        elif rows[0].shape[2] == 1 and all(valid):
            where = (mx.array(self.offsets) % self._limit)[:, None, None, None]
            buffers = [mx.put_along_axis(x, where, new, axis=2) for x, new in pairs]
        else:
            # From each ring row's side: the newest position that belongs there, and whether it is a new one.
            offsets, counts = mx.array(self.offsets)[:, None], mx.array(valid)[:, None]
            newest = offsets + counts - 1
            positions = newest - (newest - mx.arange(self.capacity)) % self._limit
            index = (positions - offsets)[:, None, :, None]
            where = mx.maximum(index, 0)
            buffers = [mx.where(index >= 0, mx.take_along_axis(new, where, axis=2), x) for x, new in pairs]
        self._buffers = buffers

    def reserve(
        self, length: int, *, shape: tuple[int, int, int] | None = None, dtype: mx.Dtype | None = None
    ) -> KV:
        """As `LayerCache.reserve`, for at most slack + 1 tokens.

        More would overwrite keys that the first of their queries sees.
        """
        if length > self.slack + 1:
            raise ValueError(
                f"cannot write {length} tokens in place; slack {self.slack} allows {self.slack + 1}"
            )
        return super().reserve(length, shape=shape, dtype=dtype)

    def commit(self, length: int, last: mx.array) -> None:
        before = self.offsets
        super().commit(length, last)
        self._keep(before, self.offsets, self._values, self._ring_row)

    def _unshare(self, sequence: int) -> None:
        super()._unshare(sequence)
        low = max(self._lows[sequence], self.offsets[sequence] + 1 - self._limit)
        self._lows = [*self._lows[:sequence], low, *self._lows[sequence + 1 :]]

    def _advance(self, valid: list[int]) -> None:
        super()._advance(valid)
        if len(valid) == 1:
            self._lows = [max(self._lows[0], self.offsets[0] - self._limit)]
            return
        self._lows = [
            max(low, offset - self._limit) for low, offset in zip(self._lows, self.offsets, strict=True)
        ]

    # Going back.

    def can_trim(self, n: int) -> bool:
        """Whether all that the next queries see is there, once the last n tokens are gone."""
        if n < 0:
            return False
        n = min(n, *self.offsets)
        ends = [offset - n for offset in self.offsets]
        firsts = [max(0, end - self.window + 1) for end in ends]
        return all(
            first >= low or first == end for first, low, end in zip(firsts, self._lows, ends, strict=True)
        )

    def trim_error(self, n: int) -> str:
        most = min(
            offset - low - self.window + 1 if low else offset
            for offset, low in zip(self.offsets, self._lows, strict=True)
        )
        text = f"cannot trim {n} tokens: older keys are overwritten, at most {most} can be trimmed"
        positions = [snapshot.position for kept in self.snapshots for snapshot in kept]
        return f"{text}; snapshots are at {positions}" if positions else text

    def _rewind(self, offsets: list[int]) -> None:
        super()._rewind(offsets)
        self._lows = [min(low, offset) for low, offset in zip(self._lows, offsets, strict=True)]
        self.snapshots = [
            tuple(snapshot for snapshot in kept if snapshot.position <= offset)
            for kept, offset in zip(self.snapshots, offsets, strict=True)
        ]

    # Snapshots.

    def snapshot(self, sequence: int = 0) -> Snapshot:
        """A copy of what the next query of a sequence sees."""
        return self._gather(self._values(), sequence, self.offsets[sequence], self._ring_row)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back, or forward, to where a snapshot of the same layer was taken.

        Raises:
            ValueError: the cache holds more than one sequence, or the snapshot is of another window or shape.
        """
        if len(self.offsets) != 1:
            raise ValueError(f"cannot restore in a batch of {len(self.offsets)} sequences; extract one first")
        length = min(snapshot.position, self.window - 1)
        if snapshot.rows and snapshot.rows[0].shape[2] != length:
            raise ValueError(
                f"the snapshot at {snapshot.position} has {snapshot.rows[0].shape[2]} keys; "
                f"a window of {self.window} needs {length}"
            )
        if snapshot.rows:
            self._admit(snapshot.rows)
        # Those of another sequence say nothing about this one.
        own = any(snapshot is kept for kept in self.snapshots[0])
        kept = tuple(s for s in self.snapshots[0] if own and s.position <= snapshot.position)
        self._hold(list(snapshot.rows), snapshot.position, length)
        self.snapshots = [kept]

    def _hold(self, rows: list[mx.array], position: int, length: int) -> None:
        """Replace what is held by the `length` tokens before `position` of every sequence."""
        batch = len(self.offsets)
        self.offsets = [position - length] * batch
        if position:
            self._fit(position, rows)
        if length:
            self._write_ring(rows, [length] * batch)
        self.offsets = [position] * batch
        self._lows = [position - length] * batch

    def mark(self, positions: Sequence[list[int]]) -> None:
        """Have snapshots kept at more positions, if there is a policy; its budget holds for them too.

        Args:
            positions: of each sequence, in or at the ends of the tokens of the next `append`.
        """
        self._marks = [list(own) for own in positions]

    def _due(self, sequence: int, start: int, end: int) -> list[int]:
        assert self.policy is not None
        marks = self._marks[sequence] if self._marks else []
        chosen = {*self.policy.due(start, end), *(p for p in marks if max(start, 1) <= p <= end)}
        return sorted(chosen - {snapshot.position for snapshot in self.snapshots[sequence]})

    def _keep(
        self,
        before: list[int],
        after: list[int],
        source: Callable[[], list[mx.array]],
        index: Callable[[int, int], int],
    ) -> None:
        """Take the snapshots that are due between two lists of offsets.

        Args:
            source: gives arrays [B, KV, n, D] that hold the tokens.
            index: (sequence, position) -> where it stands in the arrays' third axis.
        """
        if self.policy is None or (after == [before[0] + 1] and self.policy.passes_by(after[0], self._marks)):
            return
        for i, (start, end) in enumerate(zip(before, after, strict=True)):
            for position in self._due(i, start, end):
                kept = (*self.snapshots[i], self._gather(source(), i, position, index))
                self.snapshots = [
                    *self.snapshots[:i],
                    self.policy.within_budget(kept),
                    *self.snapshots[i + 1 :],
                ]
        self._marks = []

    def _gather(
        self, source: list[mx.array], sequence: int, position: int, index: Callable[[int, int], int]
    ) -> Snapshot:
        positions = range(max(0, position - self.window + 1), position)
        where = mx.array([index(sequence, p) for p in positions], dtype=mx.int32)
        # A gather always makes memory of its own, so that the bytes of a snapshot are those it says.
        rows = tuple(mx.take(x[sequence : sequence + 1], where, axis=2) for x in source)
        return Snapshot(position, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the ring and of the snapshots kept."""
        return super().nbytes + sum(snapshot.nbytes for kept in self.snapshots for snapshot in kept)

    # Copies and files.

    def _more_state(self) -> tuple[Any, ...]:
        kept = [[i, s.position, *s.rows] for i, kept in enumerate(self.snapshots) for s in kept]
        return mx.array(self._lows, dtype=mx.int32), self.window, self.slack, kept or None

    def _set_more_state(self, more: Sequence[Any]) -> None:
        lows, window, slack, kept = more
        self._set_ring(window, slack)
        self._lows = lows.tolist()
        self.policy = None
        for i, position, *rows in kept or ():
            self.snapshots[i] = (*self.snapshots[i], Snapshot(position, tuple(rows)))

    @classmethod
    def from_native(cls, native: Any, window: int, slack: int = 64) -> SlidingKVCache:
        """The contents of an mlx-lm `RotatingKVCache`.

        Raises:
            ValueError: it keeps first tokens for ever, or fewer keys than the window needs.
        """
        keys, values, offset, keep, max_size, index = native.state
        if keep:
            raise ValueError(f"the rotating cache has keep = {keep}; a sliding layer needs keep = 0")
        cache = cls(window, slack)
        if keys is None or offset == 0:
            return cache
        cache._repeat(keys.shape[0])
        rows = [_in_order(x, offset, index) for x in (keys, values)]
        length = min(rows[0].shape[2], offset, cache._limit)
        if length < min(offset, window - 1):
            raise ValueError(
                f"max_size of the rotating cache is {max_size}; window {window} needs {window - 1}"
            )
        cache._hold([x[:, :, x.shape[2] - length :] for x in rows], offset, length)
        return cache


def _in_order(x: mx.array, offset: int, index: int) -> mx.array:
    """Rows of a rotating cache in order of position; index: the row after the newest."""
    if index == x.shape[2]:
        return x
    if index < offset:
        return mx.concatenate([x[:, :, index:], x[:, :, :index]], axis=2)
    return x[:, :, :index]
