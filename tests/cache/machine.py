"""Random sequences of everything that mlx-lm and this package do with caches, against lists of tokens."""

from __future__ import annotations

import copy
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from spark25_mlx.cache import (
    FullKVCache,
    LayerCache,
    SlidingKVCache,
    Snapshot,
    SnapshotPolicy,
    can_trim,
    rewind_to,
    storage,
    trim,
)
from tests.kernels.backends import Backend

from .reference import (
    KV,
    STAND_IN,
    D,
    Sequence_,
    check_append,
    kernel_writes,
    keys_of,
    new_tags,
    stored,
    values_of,
)

_MOST_CACHES = 4
_MOST_SEQUENCES = 5
_LONGEST = 4000


@dataclass
class Session:
    """A model's caches, a sliding and a full layer, and the sequences that they must hold."""

    layers: list[LayerCache]
    sequences: list[Sequence_]

    @property
    def sliding(self) -> SlidingKVCache:
        assert isinstance(self.layers[0], SlidingKVCache)
        return self.layers[0]

    @property
    def longest(self) -> int:
        return max(len(s.tags) for s in self.sequences)

    @property
    def single(self) -> bool:
        return len(self.sequences) == 1

    def batches_with(self, other: Session) -> bool:
        return getattr(self.layers[1], "bits", None) == getattr(other.layers[1], "bits", None)


class CacheMachine(RuleBasedStateMachine):
    """Subclasses set the window, the slack, the distance of snapshots and what writes in place.

    With the back end "gpu" all operations run on MLX's default device, with the others on the CPU.
    """

    window: int
    slack: int
    every: int | None = None
    backend: Backend = STAND_IN

    def __init__(self) -> None:
        super().__init__()
        self.sessions = [self._fresh()]
        self.held: list[tuple[mx.array, np.ndarray]] = []
        self.snapshots: list[tuple[Snapshot, np.ndarray]] = []
        self.tag = 1
        self._context = ExitStack()
        self.kernel = self._context.enter_context(kernel_writes(self.backend))
        # Buffers of small windows grow in small steps, so that they grow at all.
        patch = self._context.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(storage, "_STEP", max(1, min(256, self.window // 2)))

    def _fresh(self) -> Session:
        policy = (
            None if self.every is None else SnapshotPolicy(every=self.every, max_bytes=3 * 512 * self.window)
        )
        layers: list[LayerCache] = [SlidingKVCache(self.window, self.slack, policy), FullKVCache()]
        return Session(layers, [Sequence_.fresh(self.window, self.slack)])

    def _session(self, i: int) -> Session:
        return self.sessions[i % len(self.sessions)]

    def _add(self, session: Session, i: int) -> None:
        if len(self.sessions) < _MOST_CACHES:
            self.sessions.append(session)
        else:
            self.sessions[i % _MOST_CACHES] = session

    def _length(self, kind: int, session: Session) -> int:
        """A length from a table that has the window's and the ring's edges in it."""
        ring = self.window + self.slack
        edges = (self.slack + 1, self.window - 1, self.window, self.window + 1, ring - 1, ring, ring + 1)
        table = (1, 1, 1, 2, 3, 7, *edges, 2 * ring + 3, 300, 1500)
        return max(1, min(table[kind % len(table)], _LONGEST - session.longest))

    def _tokens(self, session: Session, length: int, valid: list[int]) -> np.ndarray:
        tags = new_tags(session.sequences, length, valid, self.tag)
        self.tag += tags.size
        for sequence, row, n in zip(session.sequences, tags, valid, strict=True):
            sequence.write(row[:n])
        return tags

    def _append(self, session: Session, length: int, valid: list[int]) -> None:
        tags = self._tokens(session, length, valid)
        for layer in session.layers:
            check_append(layer, session.sequences, tags, valid)

    def _write(self, session: Session, length: int, valid: list[int]) -> None:
        tags = self._tokens(session, length, valid)
        for layer in session.layers:
            self.kernel.write(layer, tags)

    # Writing.

    @rule(i=st.integers(0, 3), kind=st.integers(0, 15))
    def append(self, i: int, kind: int) -> None:
        session = self._session(i)
        length = self._length(kind, session)
        self._append(session, length, [length] * len(session.sequences))

    @rule(i=st.integers(0, 3), length=st.integers(1, 5), times=st.integers(1, 6), hold=st.integers(0, 4))
    def write_in_place(self, i: int, length: int, times: int, hold: int) -> None:
        session = self._session(i)
        length = min(length, self.slack + 1)
        for time in range(times):
            self._write(session, length, [length] * len(session.sequences))
            if time == hold:
                self._hold_state(session, lazily=False)

    @rule(i=st.integers(0, 3), data=st.data(), in_place=st.booleans())
    def padded_prefill(self, i: int, data: st.DataObject, in_place: bool) -> None:
        session = self._session(i)
        most = min(3 * self.window, 300)
        lengths = [data.draw(st.integers(0, most)) for _ in session.sequences]
        lengths[data.draw(st.integers(0, len(lengths) - 1))] += 1
        step = self.slack + 1 if in_place else data.draw(st.sampled_from([1, 2, self.window, most, 2 * most]))
        step = max(step, max(lengths) // 4) if not in_place else step
        for layer in session.layers:
            layer.prepare(lengths=lengths, right_padding=[max(lengths) - n for n in lengths])
        try:
            self._prefill(session, lengths, step, in_place)
        finally:
            for layer in session.layers:
                layer.finalize()

    def _prefill(self, session: Session, lengths: list[int], step: int, in_place: bool) -> None:
        done = 0
        while done < max(lengths):
            length = min(step if not in_place or done < 12 else max(lengths), max(lengths) - done)
            valid = [min(length, max(0, n - done)) for n in lengths]
            if in_place and done < 12:
                self._write(session, length, valid)
            else:
                self._append(session, length, valid)
            mx.eval([layer.state for layer in session.layers])
            done += length

    # Going back.

    @rule(i=st.integers(0, 3), n=st.sampled_from([0, 1, 2, 3, 4, 5, 64, 80, None]))
    def trim(self, i: int, n: int | None) -> None:
        session = self._session(i)
        if n is not None:
            self._trim(session, n)
            return
        shortest = min(len(s.tags) for s in session.sequences)
        possible = [n for n in range(min(shortest, self.slack + 3)) if session.sliding.can_trim(n)]
        self._trim(session, possible[-1] if possible else 0)

    def _trim(self, session: Session, n: int) -> None:
        n_possible = min(n, *(len(s.tags) for s in session.sequences))
        possible = all(s.can_trim(n_possible) for s in session.sequences)
        assert can_trim(session.layers, n) == possible
        assert session.sliding.is_trimmable() or not possible or n_possible == 0 or n_possible > 1
        if possible:
            assert trim(session.layers, n) == n_possible
            for sequence in session.sequences:
                sequence.trim(n_possible)
        else:
            before = [layer.offsets for layer in session.layers]
            try:
                trim(session.layers, n)
            except ValueError:
                assert [layer.offsets for layer in session.layers] == before
            else:
                raise AssertionError("trimmed what is gone")

    @precondition(lambda self: any(s.single for s in self.sessions))
    @rule(i=st.integers(0, 3), part=st.floats(0, 1))
    def rewind(self, i: int, part: float) -> None:
        session = self._session(i)
        if not session.single:
            return
        (sequence,) = session.sequences
        end = len(sequence.tags)
        position = round(part * end)
        trimmable = sequence.can_trim(end - position)
        kept = [s.position for s in session.sliding.snapshots[0]]
        reached = rewind_to(session.layers, position)
        assert reached == (position if trimmable else max((p for p in kept if p <= position), default=0))
        if trimmable:
            sequence.trim(end - position)
        else:
            sequence.rebuild(sequence.tags[:reached], min(reached, self.window - 1))

    # Snapshots.

    @rule(i=st.integers(0, 3), which=st.integers(0, 4))
    def take_snapshot(self, i: int, which: int) -> None:
        session = self._session(i)
        which %= len(session.sequences)
        if session.sliding.empty():
            return
        self.snapshots.append((session.sliding.snapshot(which), session.sequences[which].tags))

    @precondition(lambda self: self.snapshots)
    @rule(i=st.integers(0, 3), which=st.integers(0, 9))
    def restore_snapshot(self, i: int, which: int) -> None:
        """Into a session of which all that it is about is known to be the same: a new one."""
        snapshot, tags = self.snapshots[which % len(self.snapshots)]
        session = self._session(i)
        if not session.single or session.sliding.policy is not None:
            session = self._fresh()
        session.sliding.restore(snapshot)
        (sequence,) = session.sequences
        sequence.rebuild(tags, min(len(tags), self.window - 1))
        full = FullKVCache()
        if len(tags):
            full.append(*(mx.array(x) for x in stored(full, tags[None])))
        session.layers[1] = full
        if all(session is not s for s in self.sessions):
            self._add(session, i)

    # Copies and files.

    @rule(i=st.integers(0, 3), j=st.integers(0, 3), write=st.booleans())
    def deepcopy(self, i: int, j: int, write: bool) -> None:
        session = self._session(i)
        other = Session(copy.deepcopy(session.layers), [s.copy() for s in session.sequences])
        if write:
            for own in (session, other):
                self._write(own, 1, [1] * len(own.sequences))
        self._add(other, j)

    @rule(i=st.integers(0, 3), lazily=st.booleans())
    def hold_state(self, i: int, lazily: bool) -> None:
        """Keep what is handed out, or only something unevaluated that needs it: neither may ever change."""
        self._hold_state(self._session(i), lazily)

    def _hold_state(self, session: Session, lazily: bool) -> None:
        full = session.layers[1]
        if full.empty():
            return
        longest = max(range(len(session.sequences)), key=lambda row: len(session.sequences[row].tags))
        expected = stored(full, session.sequences[longest].tags[None])
        for array, want in zip(full.state[0], expected, strict=True):
            self.held.append((array[longest] if lazily else array[longest : longest + 1], want))
        ring = session.sliding.state[0][0]
        self.held.append((ring + 0 if lazily else ring, np.array(ring)[None]))
        self.held = self.held[-8:]

    @rule(i=st.integers(0, 3))
    def evaluate_state(self, i: int) -> None:
        mx.eval([layer.state for layer in self._session(i).layers])

    @rule(i=st.integers(0, 3))
    def save_and_load(self, i: int) -> None:
        session = self._session(i)
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "cache.safetensors")
            save_prompt_cache(file, session.layers)
            loaded = load_prompt_cache(file)
            mx.eval([layer.state for layer in loaded])
        assert [type(c) for c in loaded] == [type(c) for c in session.layers]
        loaded[0].policy = session.sliding.policy
        session.layers = loaded

    @rule(i=st.integers(0, 3), bits=st.sampled_from([4, 8]))
    def quantise(self, i: int, bits: int) -> None:
        session = self._session(i)
        assert not hasattr(session.sliding, "to_quantized")
        if hasattr(session.layers[1], "to_quantized"):
            session.layers[1] = session.layers[1].to_quantized(group_size=32, bits=bits)

    # Batches.

    @rule(i=st.integers(0, 3), j=st.integers(0, 3), k=st.integers(0, 3))
    def merge(self, i: int, j: int, k: int) -> None:
        chosen = [s for s in (self._session(n) for n in (i, j)) if s.batches_with(self._session(i))]
        if sum(len(s.sequences) for s in chosen) > _MOST_SEQUENCES:
            return
        layers = [chosen[0].layers[n].merge([s.layers[n] for s in chosen]) for n in range(2)]
        self._add(Session(layers, [row.copy() for s in chosen for row in s.sequences]), k)

    @rule(i=st.integers(0, 3), j=st.integers(0, 3))
    def extend(self, i: int, j: int) -> None:
        session, other = self._session(i), self._session(j)
        if not session.batches_with(other) or len(session.sequences) + len(other.sequences) > _MOST_SEQUENCES:
            return
        for layer, more in zip(session.layers, other.layers, strict=True):
            layer.extend(more)
        session.sequences = [row.copy() for s in (session, other) for row in s.sequences]

    @rule(i=st.integers(0, 3), which=st.integers(0, 4), k=st.integers(0, 3))
    def extract(self, i: int, which: int, k: int) -> None:
        session = self._session(i)
        which %= len(session.sequences)
        layers = [layer.extract(which) for layer in session.layers]
        self._add(Session(layers, [session.sequences[which].copy()]), k)

    @rule(i=st.integers(0, 3), data=st.data())
    def filter(self, i: int, data: st.DataObject) -> None:
        session = self._session(i)
        rows = list(range(len(session.sequences)))
        keep = data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=1))
        for layer in session.layers:
            layer.filter(keep)
        session.sequences = [session.sequences[row] for row in keep]

    # What always holds.

    @invariant()
    def sizes(self) -> None:
        for session in self.sessions:
            ring = self.window + self.slack
            lengths = [len(s.tags) for s in session.sequences]
            assert session.sliding.capacity <= ring
            for layer in session.layers:
                assert layer.offsets == lengths
                assert layer.empty() == (max(lengths) == 0)
                offset: Any = layer.offset
                assert offset == lengths[0] if len(lengths) == 1 else offset.tolist() == lengths

    def _check_snapshots(self, sequence: Sequence_, kept: tuple[Snapshot, ...]) -> None:
        positions = [snapshot.position for snapshot in kept]
        assert positions == sorted(set(positions))
        for snapshot in kept:
            end = snapshot.position
            want = sequence.tags[max(0, end - self.window + 1) : end]
            assert snapshot.nbytes == 2 * len(want) * KV * D * 4
            np.testing.assert_array_equal(np.array(snapshot.rows[0])[0], keys_of(want))
            np.testing.assert_array_equal(np.array(snapshot.rows[1])[0], values_of(want))

    def teardown(self) -> None:
        try:
            for session in self.sessions:
                for sequence, kept in zip(session.sequences, session.sliding.snapshots, strict=True):
                    self._check_snapshots(sequence, kept)
                self._append(session, 1, [1] * len(session.sequences))
                length = self.window // 2 + 1
                self._append(session, length, [length] * len(session.sequences))
            for array, want in self.held:
                got = np.array(array)
                np.testing.assert_array_equal(got.reshape(want.shape), want)
        finally:
            self._context.close()


def machine(
    window: int, slack: int, every: int | None = None, backend: Backend = STAND_IN
) -> type[CacheMachine]:
    """The machine for one window, slack and snapshot distance, with a back end for the writes in place."""
    name = f"Window{window}Slack{slack}"
    attributes = {"window": window, "slack": slack, "every": every, "backend": backend}
    return type(name, (CacheMachine,), attributes)
