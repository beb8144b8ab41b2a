"""Copies of what a sliding layer sees at one position, and when to make them by themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Snapshot:
    """What the next query of one sequence sees of the tokens before it.

    Attributes:
        position: tokens before it, which is the position of that query.
        rows: keys and values [1, KV, min(position, window - 1), D] in order of position.
    """

    position: int
    rows: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.rows)


@dataclass(frozen=True)
class SnapshotPolicy:
    """Positions at which a sliding layer keeps snapshots by itself.

    Which ones are kept depends on positions and sizes alone, never on how tokens were divided into chunks.
    Hence all layers with heads of one shape hold snapshots of the same positions.

    Attributes:
        every: one at every multiple of it; None for none.
        at: more positions, such as the ends of turns: a collection of them, or a function of (start, end)
            that gives those with start < position <= end.
        max_bytes: what the snapshots of one sequence may take in one layer.
    """

    every: int | None = None
    at: Collection[int] | Callable[[int, int], Iterable[int]] = ()
    max_bytes: int = 1 << 24

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"every is {self.every}; snapshots are taken every 1 or more tokens, or None")
        if self.max_bytes < 0:
            raise ValueError(f"max_bytes is {self.max_bytes}; it must not be negative")

    def passes_by(self, position: int, marks: Collection[object]) -> bool:
        """Whether no snapshot is due at a position, as far as can be told at once."""
        return not marks and not self.at and (self.every is None or position % self.every != 0)

    def due(self, start: int, end: int) -> list[int]:
        """Positions with start < position <= end, in order."""
        chosen = set(self.at(start, end) if callable(self.at) else self.at)
        if self.every is not None:
            chosen.update(range((start // self.every + 1) * self.every, end + 1, self.every))
        return sorted(position for position in chosen if start < position <= end)

    def within_budget(self, kept: tuple[Snapshot, ...]) -> tuple[Snapshot, ...]:
        """The snapshots, in order of position, without those least missed.

        The newest stays as long as possible. Of the others the one goes whose neighbours are closest to each
        other, because going back to it costs few more tokens from the one before; the oldest among equals.
        """
        snapshots = list(kept)
        while sum(snapshot.nbytes for snapshot in snapshots) > self.max_bytes:
            positions = [0, *(snapshot.position for snapshot in snapshots)]
            gaps = [positions[i + 2] - positions[i] for i in range(len(snapshots) - 1)]
            del snapshots[gaps.index(min(gaps)) if gaps else 0]
        return tuple(snapshots)
