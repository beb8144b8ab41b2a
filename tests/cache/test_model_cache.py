"""Going back in all layers at once, automatic snapshots, and files that mlx-lm's own caches were saved to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as native
import numpy as np
import pytest

from spark25_mlx.cache import (
    FullKVCache,
    QuantizedFullKVCache,
    SlidingKVCache,
    Snapshot,
    SnapshotPolicy,
    adopt,
    can_trim,
    rewind_to,
    trim,
)

from .reference import KV, D, keys_of, values_of


def fill(cache: list[Any], *chunks: int) -> None:
    for n in chunks:
        for c in cache:
            tags = 1 + int(c.offset) + np.arange(n)[None]
            c.append(mx.array(keys_of(tags)), mx.array(values_of(tags)))


def model_cache(policy: SnapshotPolicy | None = None) -> list[Any]:
    return [SlidingKVCache(8, 4, policy), FullKVCache(), SlidingKVCache(8, 4, policy)]


def test_all_layers_trim_or_none() -> None:
    cache = model_cache()
    fill(cache, 20)
    assert can_trim(cache, 5) and not can_trim(cache, 6)
    with pytest.raises(ValueError, match=r"layer 0: cannot trim 6 tokens: .* nothing has been trimmed"):
        trim(cache, 6)
    assert [c.offset for c in cache] == [20, 20, 20]
    assert trim(cache, 5) == 5
    assert [c.offset for c in cache] == [15, 15, 15]
    assert trim(cache, 99) == 15
    with pytest.raises(ValueError, match="negative"):
        trim(cache, -1)


def test_layers_of_mlx_lm_answer_for_themselves() -> None:
    rotating = native.RotatingKVCache(max_size=8)
    x = mx.zeros((1, KV, 8, D))
    rotating.update_and_fetch(x, x)
    fill(cache := model_cache(), 8)
    assert not can_trim([*cache, rotating], 1)
    with pytest.raises(ValueError, match="layer 3: cannot trim 1 tokens"):
        trim([*cache, rotating], 1)
    assert trim([*cache, native.KVCache()], 1) == 0
    assert cache[0].offset == 7


def test_rewinding_takes_the_nearest_way() -> None:
    cache = model_cache(SnapshotPolicy(every=10))
    fill(cache, 7, 40, 1, 1)
    assert rewind_to(cache, 46) == 46
    assert rewind_to(cache, 39) == 30
    assert [c.offset for c in cache] == [30, 30, 30]
    assert [[s.position for s in c.snapshots[0]] for c in cache[::2]] == [[10, 20, 30]] * 2
    fill(cache, 3)
    assert rewind_to(cache, 9) == 0
    assert all(c.empty() for c in cache)
    assert cache[0].snapshots == [()]


def test_rewinding_refuses_what_it_cannot_mean() -> None:
    cache = model_cache()
    fill(cache, 9)
    with pytest.raises(ValueError, match="position 10 of 9"):
        rewind_to(cache, 10)
    batch = [c.merge([c, c]) for c in cache]
    with pytest.raises(ValueError, match="batch of 2"):
        rewind_to(batch, 3)
    fill(cache[:1], 1)
    with pytest.raises(ValueError, match="must hold the same"):
        rewind_to(cache, 3)


def test_positions_at_which_snapshots_are_due() -> None:
    policy = SnapshotPolicy(every=10, at={3, 25, 99})
    assert policy.due(0, 30) == [3, 10, 20, 25, 30]
    assert policy.due(10, 20) == [20]
    assert SnapshotPolicy(at=lambda start, end: [start, end, end + 1]).due(4, 7) == [7]
    assert SnapshotPolicy().due(0, 10_000) == []
    with pytest.raises(ValueError, match="every is 0"):
        SnapshotPolicy(every=0)
    with pytest.raises(ValueError, match="max_bytes is -1"):
        SnapshotPolicy(max_bytes=-1)


def test_the_snapshot_least_missed_goes() -> None:
    def at(*positions: int) -> tuple[Snapshot, ...]:
        return tuple(Snapshot(p, (mx.zeros(25),)) for p in positions)

    policy = SnapshotPolicy(max_bytes=300)
    assert [s.position for s in policy.within_budget(at(10, 20, 30))] == [10, 20, 30]
    assert [s.position for s in policy.within_budget(at(10, 50, 60, 100))] == [50, 60, 100]
    assert [s.position for s in policy.within_budget(at(40, 80, 81, 120))] == [40, 80, 120]
    assert SnapshotPolicy(max_bytes=99).within_budget(at(10)) == ()


@pytest.mark.parametrize("chunks", [[60], [1] * 60, [7] * 8 + [4], [59, 1], [30, 30]])
def test_snapshots_do_not_depend_on_chunks(chunks: list[int]) -> None:
    cache = SlidingKVCache(8, 4, SnapshotPolicy(every=7, at=[33], max_bytes=4 * 2 * 7 * KV * D * 4))
    fill([cache], *chunks)
    (snapshots,) = cache.snapshots
    assert [s.position for s in snapshots] == [14, 33, 49, 56]
    for snapshot in snapshots:
        tags = np.arange(snapshot.position - 6, snapshot.position + 1)
        np.testing.assert_array_equal(np.array(snapshot.rows[0])[0], keys_of(tags))
    assert cache.nbytes == (12 + 4 * 7) * 2 * KV * D * 4


def test_files_of_mlx_lm_load(tmp_path: Path) -> None:
    theirs = [native.RotatingKVCache(max_size=8), native.KVCache(), native.RotatingKVCache(max_size=8)]
    for c in theirs:
        for tags in (np.arange(1, 21)[None], np.array([[21]])):
            c.update_and_fetch(mx.array(keys_of(tags)), mx.array(values_of(tags)))
    theirs[1] = theirs[1].to_quantized(group_size=32, bits=4)
    file = str(tmp_path / "cache.safetensors")
    native.save_prompt_cache(file, theirs)
    cache = adopt(native.load_prompt_cache(file), window=8, slack=4)
    assert [type(c) for c in cache] == [SlidingKVCache, QuantizedFullKVCache, SlidingKVCache]
    assert [c.offset for c in cache] == [21, 21, 21]
    keys, _ = cache[0].append(*(mx.array(f(np.array([[22, 23]]))) for f in (keys_of, values_of)))
    np.testing.assert_array_equal(np.array(keys), keys_of(np.arange(15, 24)[None]))
    assert adopt(cache, window=8) == cache
    with pytest.raises(ValueError, match="layer 0: the cache has window 8, the model 16"):
        adopt(cache, window=16)
    with pytest.raises(ValueError, match="layer 0: cannot convert a BatchKVCache"):
        adopt([native.BatchKVCache([0])], window=8)


def test_files_of_empty_caches_load(tmp_path: Path) -> None:
    file = str(tmp_path / "cache.safetensors")
    cache = [SlidingKVCache(8, 4), FullKVCache(), QuantizedFullKVCache(32, 4)]
    mx.eval([c.state for c in cache])
    native.save_prompt_cache(file, cache)
    loaded = native.load_prompt_cache(file)
    fill(loaded, 5)
    assert [c.offset for c in loaded] == [5, 5, 5]
    assert (loaded[0].window, loaded[0].slack, loaded[2].group_size, loaded[2].bits) == (8, 4, 32, 4)
