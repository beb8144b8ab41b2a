"""When a model's caches keep snapshots by themselves: the defaults, and SPARK25_SNAPSHOTS.

A sliding layer forgets all but its window, so a prompt that leaves an earlier one behind can go on only from
where a snapshot was taken. One snapshot is min(position, window - 1) keys and values of every sliding layer:
56.5 MB for the 4B model in bf16, 22 MB for the 1.7B.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cache import SnapshotPolicy

VARIABLE = "SPARK25_SNAPSHOTS"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SYNTAX = 'it must be "off" or a comma list of every=N|off, turns=ID|off and max_bytes=N[K|M|G]'


@dataclass(frozen=True)
class AutoSnapshots:
    """Where snapshots of a prompt are taken, and what they may take.

    The defaults fit an 8 GB Mac with the 4B model in 4 bits: four snapshots a conversation. Of those that the
    budget cannot hold, `SnapshotPolicy.within_budget` drops the ones that save the fewest tokens, but not the
    newest. That is where the answer begins: templates leave earlier thoughts out, so the next request usually
    differs from there on. Generated tokens get no snapshots, which would push that one out.

    Attributes:
        every: a snapshot at its multiples; None for none.
        turns: id of the token that begins every turn, for a snapshot in front of each; 0 is the family's BOS,
            None for none.
        max_bytes: of one sequence, all layers together.
    """

    every: int | None = 1024
    turns: int | None = 0
    max_bytes: int = 256 << 20

    @classmethod
    def parse(cls, text: str) -> AutoSnapshots | None:
        """Read what SPARK25_SNAPSHOTS holds, such as "every=1024,turns=0,max_bytes=256M"; None for "off".

        What is not named keeps its default.

        Raises:
            ValueError: it is something else.
        """
        if text.strip().lower() == "off":
            return None
        chosen: dict[str, Any] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            key, _, value = map(str.strip, part.partition("="))
            pattern = {"every": r"0*[1-9]\d*|OFF", "turns": r"\d+|OFF", "max_bytes": r"\d+[KMG]?"}.get(key)
            value = value.upper()
            if pattern is None or not re.fullmatch(pattern, value):
                raise ValueError(f"{VARIABLE}: {part!r} is not understood; {_SYNTAX}")
            unit = value[-1] if value[-1] in _UNITS else ""
            chosen[key] = None if value == "OFF" else int(value.removesuffix(unit)) * _UNITS.get(unit, 1)
        return cls(**chosen)

    @classmethod
    def from_environment(cls) -> AutoSnapshots | None:
        """As SPARK25_SNAPSHOTS says; the defaults when it is not set."""
        return cls.parse(os.environ.get(VARIABLE, ""))

    def of_layer(self, sliding_layers: int) -> SnapshotPolicy:
        """The policy of one of so many sliding layers with heads of one shape; positions come by `mark`."""
        return SnapshotPolicy(max_bytes=self.max_bytes // sliding_layers)

    def positions(self, ids: np.ndarray, start: int) -> list[int]:
        """Where to take snapshots in a piece of a prompt [L] that begins at position `start`."""
        turns = np.flatnonzero(ids == self.turns) + start if self.turns is not None else ()
        first = -(-start // self.every) * self.every if self.every else 0
        multiples = range(first, start + len(ids) + 1, self.every) if self.every else ()
        return [int(position) for position in (*turns, *multiples)]
