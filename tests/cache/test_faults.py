"""Faults planted in the caches, each of which the random search must find."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from spark25_mlx.cache.full import GrowingKVCache
from spark25_mlx.cache.sliding import SlidingKVCache
from spark25_mlx.cache.storage import LayerCache
from spark25_mlx.custom_kernels.backend import REFERENCE
from tests.kernels.backends import GPU, SIMULATOR, Backend

from .machine import machine

_write_ring = SlidingKVCache._write_ring
_copy = LayerCache.copy
_fit = LayerCache._fit
_stacked = LayerCache._stacked
_advance = SlidingKVCache._advance
_state = vars(LayerCache)["state"].fget
_ring_mask = SlidingKVCache._ring_mask


def window_too_small(self: SlidingKVCache) -> list[int]:
    return [min(offset, self.window - 2) for offset in self.offsets]


def ring_mask_too_wide(self: SlidingKVCache) -> mx.array | None:
    self.window += 1
    mask = _ring_mask(self)
    self.window -= 1
    return mask


def overwritten_rows_forgotten(self: SlidingKVCache, valid: list[int]) -> None:
    lows = self._lows
    _advance(self, valid)
    self._lows = lows


def padding_written(self: SlidingKVCache, rows: list[mx.array], valid: list[int]) -> None:
    _write_ring(self, rows, [rows[0].shape[2]] * len(valid))


def copy_not_shared(self: LayerCache) -> LayerCache:
    copy = _copy(self)
    copy._shared = self._shared = False
    return copy


def state_not_shared(self: LayerCache) -> tuple[Any, ...]:
    shared = self._shared
    state = _state(self)
    self._shared = shared
    return state


def writes_not_awaited(self: LayerCache) -> None:
    self._last = None


def grown_at_the_front(self: LayerCache, tokens: int, layout: Any) -> None:
    before = self.capacity
    _fit(self, tokens, layout)
    if before:
        self._buffers = [mx.roll(x, self.capacity - before, 2) for x in self._values()]


def trim_by_one_less(self: SlidingKVCache, offsets: list[int]) -> None:
    self.offsets = [offset + 1 for offset in offsets]


def full_trim_by_one_more(self: GrowingKVCache, offsets: list[int]) -> None:
    self.offsets = [max(0, offset - 1) for offset in offsets]


def snapshots_survive_trimming(self: SlidingKVCache, offsets: list[int]) -> None:
    LayerCache._rewind(self, offsets)


def merged_aligned_at_the_end(self: LayerCache, rows: int, layout: Any) -> list[mx.array]:
    return [mx.roll(x, rows - self.size(), 2) for x in _stacked(self, rows, layout)]


FAULTS: list[tuple[type, str, Any, str]] = [
    (SlidingKVCache, "history", property(window_too_small), "window_too_small"),
    (SlidingKVCache, "_ring_mask", ring_mask_too_wide, "ring_mask_too_wide"),
    (SlidingKVCache, "_advance", overwritten_rows_forgotten, "overwritten_rows_forgotten"),
    (SlidingKVCache, "_write_ring", padding_written, "padding_written"),
    (SlidingKVCache, "_rewind", trim_by_one_less, "trim_by_one_less"),
    (SlidingKVCache, "_rewind", snapshots_survive_trimming, "snapshots_survive_trimming"),
    (GrowingKVCache, "_rewind", full_trim_by_one_more, "full_trim_by_one_more"),
    (LayerCache, "copy", copy_not_shared, "copy_not_shared"),
    (LayerCache, "state", vars(LayerCache)["state"].getter(state_not_shared), "state_not_shared"),
    (LayerCache, "sync", writes_not_awaited, "writes_not_awaited"),
    (LayerCache, "_fit", grown_at_the_front, "grown_at_the_front"),
    (LayerCache, "_stacked", merged_aligned_at_the_end, "merged_aligned_at_the_end"),
]


# What writes in place show must show with the kernel's too. In the simulator, those not awaited never run.
SHOWN_BY = {
    REFERENCE: {name for *_, name in FAULTS},
    SIMULATOR: {"copy_not_shared", "state_not_shared"},
    GPU: {"copy_not_shared", "state_not_shared", "writes_not_awaited"},
}
CASES = [
    pytest.param(*fault, backend, marks=getattr(pytest.mark, backend), id=f"{backend}-{name}")
    for backend, names in SHOWN_BY.items()
    for *fault, name in FAULTS
    if name in names
]


@pytest.mark.parametrize(("owner", "attribute", "fault", "backend"), CASES, indirect=["backend"])
def test_the_search_finds(
    owner: type, attribute: str, fault: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine(8, 4, 5, backend),
            settings=settings(
                max_examples=300,
                stateful_step_count=20,
                deadline=None,
                phases=[Phase.generate],
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
