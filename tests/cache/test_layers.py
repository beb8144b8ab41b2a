"""What the kinds of caches promise one by one: forms of masks, what is refused, conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as native
import numpy as np
import pytest

from spark25_mlx.cache import FullKVCache, LayerCache, QuantizedFullKVCache, SlidingKVCache, TurboFullKVCache
from spark25_mlx.custom_kernels.turbo import turbo_dequantize, turbo_quantize

from .reference import KV, D, Sequence_, check_append, flat, keys_of, stored, values_of


def tokens(first: int, n: int, batch: int = 1) -> tuple[mx.array, mx.array]:
    tags = first + np.arange(n)[None] + 1000 * np.arange(batch)[:, None]
    return mx.array(keys_of(tags)), mx.array(values_of(tags))


def sequences_of(cache: SlidingKVCache, *lengths: int) -> list[Sequence_]:
    rows = [Sequence_.fresh(cache.window, cache.slack) for _ in lengths]
    for row, n in zip(rows, lengths, strict=True):
        row.write(np.arange(1, n + 1))
    return rows


def test_masks_of_a_full_cache() -> None:
    cache = FullKVCache()
    assert cache.mask(1) is None
    assert cache.mask(5) == "causal"
    cache.append(*tokens(1, 5))
    assert cache.mask(1) is None
    assert cache.mask(5) == "causal"
    batch = FullKVCache.merge([cache, FullKVCache()])
    mask = batch.mask(2)
    assert isinstance(mask, mx.array) and mask.shape == (2, 1, 2, 7)
    assert mask.sum(axis=-1).tolist() == [[[6, 7]], [[1, 2]]]


def test_masks_of_a_sliding_cache() -> None:
    cache: Any = SlidingKVCache(8, 4)
    assert cache.mask(1) is None
    assert cache.mask(8) == "causal"
    assert cache.mask(9).shape == (9, 9)
    cache.append(*tokens(1, 7))
    assert cache.history == [7]
    assert cache.mask(1) is None
    assert cache.mask(2).shape == (2, 9)
    cache.append(*tokens(8, 1))
    assert cache.mask(1).tolist() == [[False] + [True] * 8]
    cache.append(*tokens(9, 9))
    assert cache.mask(1).shape == (1, 12)
    assert SlidingKVCache(8, 0).mask(1) is None


def test_a_chunk_sees_its_history_right_before_it() -> None:
    cache = SlidingKVCache(8, 4)
    cache.append(*tokens(1, 30))
    keys, values = cache.append(*tokens(31, 5))
    np.testing.assert_array_equal(np.array(keys), keys_of(np.arange(24, 36)[None]))
    np.testing.assert_array_equal(np.array(values), values_of(np.arange(24, 36)[None]))
    assert cache.capacity == 12


@pytest.mark.parametrize("cache", [FullKVCache(), SlidingKVCache(8), QuantizedFullKVCache(32, 4)])
def test_what_does_not_fit_is_refused(cache: LayerCache) -> None:
    with pytest.raises(ValueError, match="length 0"):
        cache.append(*tokens(1, 0))
    cache.append(*tokens(1, 3))
    with pytest.raises(ValueError, match="holds 1 sequences; keys and values have 2"):
        cache.append(*tokens(4, 1, batch=2))
    with pytest.raises(ValueError, match="heads, width, dtype"):
        cache.append(*(x[:, :1] for x in tokens(4, 1)))
    with pytest.raises(ValueError, match="not of the same tokens"):
        cache.append(tokens(4, 1)[0], tokens(4, 2)[1])
    with pytest.raises(ValueError, match="cannot trim -1"):
        cache.trim(-1)
    with pytest.raises(ValueError, match="at least one sequence"):
        cache.filter([])
    with pytest.raises(ValueError, match="cannot batch"):
        cache.merge([cache, FullKVCache() if isinstance(cache, SlidingKVCache) else SlidingKVCache(8)])
    assert cache.offset == 3


def test_another_dtype_is_refused() -> None:
    cache = FullKVCache()
    cache.append(*tokens(1, 3))
    with pytest.raises(ValueError, match="float16"):
        cache.append(*(x.astype(mx.float16) for x in tokens(4, 1)))


def test_padding_is_refused_where_it_cannot_be_right() -> None:
    cache: Any = FullKVCache()
    with pytest.raises(ValueError, match="on the left"):
        cache.prepare(left_padding=[0, 1])
    with pytest.raises(ValueError, match="needs lengths"):
        cache.prepare(right_padding=[0, 1])
    cache.prepare(lengths=[1, 2], right_padding=[1, 0])
    cache.append(*tokens(1, 2, batch=2))
    with pytest.raises(ValueError, match="finalize"):
        cache.append(*tokens(3, 1, batch=2))
    with pytest.raises(ValueError, match="lengths has 3"):
        cache.prepare(lengths=[1, 2, 3])
    cache.finalize()
    cache.append(*tokens(3, 1, batch=2))
    assert cache.offsets == [2, 3]
    assert cache.offset.tolist() == [2, 3]


def test_trimming_stops_at_the_shortest_sequence() -> None:
    short, long = FullKVCache(), FullKVCache()
    short.append(*tokens(1, 2))
    long.append(*tokens(1, 5))
    batch = FullKVCache.merge([short, long])
    assert batch.trim(4) == 2
    assert batch.offsets == [0, 3]


def test_a_ring_trims_its_slack_and_says_when_it_cannot() -> None:
    cache = SlidingKVCache(8, 4)
    cache.append(*tokens(1, 7))
    assert cache.can_trim(7)
    cache.append(*tokens(8, 30))
    assert [n for n in range(40) if cache.can_trim(n)] == [0, 1, 2, 3, 4, 5, 37, 38, 39]
    assert cache.is_trimmable()
    with pytest.raises(ValueError, match="at most 5 can be trimmed"):
        cache.trim(6)
    assert cache.trim(5) == 5
    assert not cache.is_trimmable()
    assert cache.trim(99) == 32
    assert cache.empty() and cache.is_trimmable()


def test_a_ring_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="different slack: 4 and 5"):
        SlidingKVCache.merge([SlidingKVCache(8, 4), SlidingKVCache(8, 5)])
    with pytest.raises(ValueError, match="must be at least 1 and 0"):
        SlidingKVCache(0)
    with pytest.raises(ValueError, match="6 tokens in place; slack 4 allows 5"):
        SlidingKVCache(8, 4).reserve(6, shape=(1, KV, D), dtype=mx.float32)


def test_snapshots_go_back_and_forth() -> None:
    cache = SlidingKVCache(8, 4)
    sequence = Sequence_.fresh(8, 4)
    snapshots = [cache.snapshot()]
    for n in (3, 20, 1):
        tags = np.arange(len(sequence.tags), len(sequence.tags) + n) + 1
        sequence.write(tags)
        check_append(cache, [sequence], tags[None], [n])
        snapshots.append(cache.snapshot())
    assert [s.position for s in snapshots] == [0, 3, 23, 24]
    assert snapshots[-1].nbytes == 2 * 7 * KV * D * 4
    for snapshot in (*snapshots, *reversed(snapshots)):
        cache.restore(snapshot)
        sequence.rebuild(np.arange(1, snapshot.position + 1), min(snapshot.position, 7))
        tags = np.array([[500]])
        sequence.write(tags[0])
        check_append(cache, [sequence], tags, [1])


def test_a_snapshot_that_does_not_fit_is_refused() -> None:
    cache = SlidingKVCache(8, 4)
    cache.append(*tokens(1, 20))
    with pytest.raises(ValueError, match="has 7 keys; a window of 9 needs 8"):
        SlidingKVCache(9, 4).restore(cache.snapshot())
    with pytest.raises(ValueError, match="batch of 2"):
        SlidingKVCache.merge([cache, cache]).restore(cache.snapshot())


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_rows_are_those_of_mlx(bits: int) -> None:
    cache = QuantizedFullKVCache(32, bits)
    cache.append(*tokens(1, 3))
    got = flat(cache.append(*tokens(4, 1)))
    for x, want in zip(got, stored(cache, np.arange(1, 5)[None]), strict=True):
        np.testing.assert_array_equal(np.array(x), want)


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ValueError, match="bits is 3"):
        QuantizedFullKVCache(64, 3)
    with pytest.raises(ValueError, match="group_size is 48"):
        QuantizedFullKVCache(48, 4)
    with pytest.raises(ValueError, match="head_dim of the keys is 32, not a multiple of group_size 64"):
        QuantizedFullKVCache(64, 4).append(*tokens(1, 1))
    full = FullKVCache()
    full.append(*tokens(1, 2))
    assert full.to_quantized(group_size=32, bits=4).bits == 4
    assert not hasattr(SlidingKVCache(8), "to_quantized")
    assert not hasattr(QuantizedFullKVCache(32, 8), "to_quantized")


def test_rotated_rows(tmp_path: Path) -> None:
    """`append` gives back what the stored rows stand for, however they got there, and after going back."""
    keys, values = (mx.random.normal((2, 3, 50, 64), key=mx.random.key(i)) for i in (0, 1))
    want = [np.array(turbo_dequantize(*turbo_quantize(x))) for x in (keys, values)]
    cache = TurboFullKVCache()
    for start, end in ((0, 30), (30, 31), (31, 44)):
        seen = cache.append(keys[:, :, start:end], values[:, :, start:end])
        for x, y in zip(seen, want, strict=True):
            np.testing.assert_allclose(np.array(x), y[:, :, :end], atol=1e-5)
    full = FullKVCache()
    full.append(keys[:, :, :44], values[:, :, :44])
    converted = TurboFullKVCache()
    converted._encode_all(full)
    native.save_prompt_cache(str(tmp_path / "file.safetensors"), [cache])
    (loaded,) = native.load_prompt_cache(str(tmp_path / "file.safetensors"))
    assert type(loaded) is TurboFullKVCache
    for other in (
        cache.copy(),
        converted,
        loaded,
        cache.extract(0).merge([cache.extract(0), cache.extract(1)]),
    ):
        assert other.trim(4) == 4
        seen = other.append(keys[:, :, 40:], values[:, :, 40:])
        assert other.offsets == [50, 50]
        for x, y in zip(seen, want, strict=True):
            np.testing.assert_allclose(np.array(x), y, atol=1e-5)
    assert cache.offsets == [44, 44]
    (codes, scales), _ = cache.reserve(1, shape=(2, 3, 64), dtype=mx.float32)
    assert codes.dtype == mx.uint32 and codes.shape == (2, 3, 256, 8) and scales.shape == (2, 3, 256, 1)
    with pytest.raises(ValueError, match="the cache holds"):
        cache.reserve(1, shape=(2, 3, 32), dtype=mx.float32)
    assert cache.token_bytes(3, 64, mx.float32) == 2 * 3 * (64 // 2 + 4)
    with pytest.raises(
        ValueError, match=r"head_dim of the keys is 96; turbo rows have one of \(32, 64, 128, 256\)"
    ):
        TurboFullKVCache().append(mx.zeros((1, 1, 1, 96)), mx.zeros((1, 1, 1, 96)))


def test_format_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    full = FullKVCache()
    full.append(*tokens(1, 2))
    for value in ("", "affine", " Affine "):
        monkeypatch.setenv("SPARK25_KV_FORMAT", value)
        assert type(full.to_quantized(group_size=32, bits=4)) is QuantizedFullKVCache
    monkeypatch.setenv("SPARK25_KV_FORMAT", "turbo")
    cache = full.to_quantized(group_size=32, bits=4)
    assert type(cache) is TurboFullKVCache and cache.offsets == [2]
    assert not hasattr(cache, "to_quantized") and not hasattr(cache, "bits")
    with pytest.raises(ValueError, match="group_size is 77"):
        full.to_quantized(group_size=77, bits=4)
    with pytest.raises(ValueError, match="SPARK25_KV_FORMAT=turbo has 4 bits a value, and 8 are asked for"):
        full.to_quantized(group_size=32, bits=8)
    monkeypatch.setenv("SPARK25_KV_FORMAT", "fast")
    with pytest.raises(ValueError, match="SPARK25_KV_FORMAT is 'fast'; it must be affine or turbo"):
        full.to_quantized()


def test_what_mlx_lm_kept_in_full() -> None:
    theirs = native.KVCache()
    assert FullKVCache.from_native(theirs).empty()
    theirs.update_and_fetch(*tokens(1, 9))
    theirs.trim(2)
    for make in (lambda: FullKVCache.from_native(theirs), lambda: quantised(theirs)):
        cache = make()
        (sequence,) = sequences_of(SlidingKVCache(8), 7)
        sequence.write(np.array([77]))
        check_append(cache, [sequence], np.array([[77]]), [1])


def quantised(cache: Any) -> QuantizedFullKVCache:
    return QuantizedFullKVCache.from_native(cache.to_quantized(group_size=32, bits=8))


@pytest.mark.parametrize(
    "chunks", [[3], [8], [8, 1], [5, 1, 1], [3, *[1] * 20], [30], [30, 1, 1, 1], [30, 4], [9, 9, 1]]
)
@pytest.mark.parametrize(("max_size", "slack"), [(8, 4), (8, 0), (20, 4)])
def test_what_mlx_lm_kept_of_a_window(chunks: list[int], max_size: int, slack: int) -> None:
    theirs = native.RotatingKVCache(max_size=max_size)
    for i, n in enumerate(chunks):
        theirs.update_and_fetch(*tokens(1 + sum(chunks[:i]), n))
    cache = SlidingKVCache.from_native(theirs, window=8, slack=slack)
    (sequence,) = sequences_of(cache, sum(chunks))
    assert not cache.can_trim(1) or sequence.can_trim(1)
    for length in (1, 3, 1, 20):
        tags = 500 + np.arange(length)[None]
        sequence.write(tags[0])
        check_append(cache, [sequence], tags, [length])


def test_a_rotating_cache_that_does_not_fit_is_refused() -> None:
    theirs = native.RotatingKVCache(max_size=6)
    for i in range(9):
        theirs.update_and_fetch(*tokens(1 + i, 1))
    with pytest.raises(ValueError, match="is 6; window 8 needs 7"):
        SlidingKVCache.from_native(theirs, window=8)
    with pytest.raises(ValueError, match="keep = 4"):
        SlidingKVCache.from_native(native.RotatingKVCache(max_size=8, keep=4), window=8)
