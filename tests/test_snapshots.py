"""SPARK25_SNAPSHOTS."""

from __future__ import annotations

import numpy as np
import pytest

from spark25_mlx.snapshots import AutoSnapshots

M = 1 << 20


@pytest.mark.parametrize(
    ("text", "snapshots"),
    [
        ("", AutoSnapshots()),
        ("every=512", AutoSnapshots(every=512)),
        ("every=off, turns=off", AutoSnapshots(every=None, turns=None)),
        (" Every = 1".lower() + ", turns=7,max_bytes=1g,", AutoSnapshots(1, 7, 1024 * M)),
        ("max_bytes=64M", AutoSnapshots(max_bytes=64 * M)),
        ("max_bytes=0", AutoSnapshots(max_bytes=0)),
        ("max_bytes=12345", AutoSnapshots(max_bytes=12345)),
        ("off", None),
        (" OFF ", None),
    ],
)
def test_parse(text: str, snapshots: AutoSnapshots | None) -> None:
    assert AutoSnapshots.parse(text) == snapshots


@pytest.mark.parametrize(
    "text",
    [
        *(
            "every=0",
            "every=-1",
            "every",
            "every=",
            "every=1K",
            "every=1.5",
            "on",
            "0",
            "no=1",
            "max_bytes=off",
        ),
        *("max_bytes=1T", "max_bytes=M", "turns=-1", "turns=x", "every=1 turns=2"),
    ],
)
def test_what_is_not_understood(text: str) -> None:
    with pytest.raises(ValueError, match=r"^SPARK25_SNAPSHOTS: .* is not understood; it must be") as caught:
        AutoSnapshots.parse(text)
    assert "\n" not in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("snapshots", "start", "positions"),
    [
        (AutoSnapshots(every=4), 0, [1, 5, 0, 4, 8]),
        (AutoSnapshots(every=4), 4, [5, 9, 4, 8, 12]),
        (AutoSnapshots(every=4, turns=7), 5, [8, 8, 12]),
        (AutoSnapshots(every=9, turns=None), 1, [9]),
        (AutoSnapshots(every=9, turns=None), 2, [9]),
        (AutoSnapshots(every=9, turns=None), 10, [18]),
        (AutoSnapshots(every=None), 100, [101, 105]),
        (AutoSnapshots(every=None, turns=None), 100, []),
    ],
)
def test_positions(snapshots: AutoSnapshots, start: int, positions: list[int]) -> None:
    """In front of turns and at multiples, both ends of the piece included."""
    assert snapshots.positions(np.array([3, 0, 5, 7, 9, 0, 2, 1]), start) == positions


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK25_SNAPSHOTS", raising=False)
    assert AutoSnapshots.from_environment() == AutoSnapshots()
    monkeypatch.setenv("SPARK25_SNAPSHOTS", "every=99")
    assert AutoSnapshots.from_environment() == AutoSnapshots(every=99)


def test_the_budget_is_shared_by_the_layers() -> None:
    """Four snapshots of the 4B model: 27 sliding layers with 4 KV heads of 256 in bf16."""
    policy = AutoSnapshots().of_layer(27)
    assert policy.max_bytes // (511 * 2 * 4 * 256 * 2) == 4
