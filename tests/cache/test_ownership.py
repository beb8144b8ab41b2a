"""Who holds the memory of the buffers: copies are made if, and only if, others would see a write."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.cache import FullKVCache, LayerCache, QuantizedFullKVCache, SlidingKVCache, TurboFullKVCache

from .reference import KV, D, KernelWrites, flat, kernel_writes, keys_of, values_of


def filled(cache: LayerCache, n: int, first: int = 1) -> LayerCache:
    tags = np.arange(first, first + n)[None]
    cache.append(mx.array(keys_of(tags)), mx.array(values_of(tags)))
    return cache


def address(x: mx.array) -> int:
    mx.eval(x)
    return np.array(x, copy=False).ctypes.data


def addresses(cache: LayerCache) -> list[int]:
    return [address(x) for x in flat(cache.reserve(1))]


CACHES = [FullKVCache, lambda: SlidingKVCache(8, 4), lambda: QuantizedFullKVCache(32, 8), TurboFullKVCache]


@pytest.fixture(params=CACHES, ids=["full", "sliding", "quantised", "turbo"])
def cache(request: pytest.FixtureRequest) -> LayerCache:
    return filled(request.param(), 20)


def test_reserve_keeps_memory_that_nobody_else_holds(cache: LayerCache) -> None:
    before = addresses(cache)
    mx.eval(cache.state)
    assert addresses(cache) == before


def test_reserve_copies_memory_whose_state_is_held(cache: LayerCache) -> None:
    before = addresses(cache)
    held = cache.state[0]
    assert not set(before) & set(addresses(cache))
    assert len(held) == len(before)


def test_reserve_copies_memory_that_an_unevaluated_operation_needs(cache: LayerCache) -> None:
    before = addresses(cache)
    sums = [x.sum() for x in cache.state[0]]
    assert not set(before) & set(addresses(cache))
    assert len(sums) == len(before)


def test_of_two_copies_the_first_to_write_takes_new_memory(cache: LayerCache) -> None:
    before = addresses(cache)
    other = copy.deepcopy(cache)
    assert not set(before) & set(addresses(other))
    assert addresses(cache) == before


def test_a_copied_buffer_keeps_every_bit() -> None:
    x = mx.array(np.where(np.arange(D) % 2, -0.0, 0.0).astype(np.float32))
    x = mx.broadcast_to(x, (1, KV, 4, D)).astype(mx.bfloat16)
    cache = FullKVCache()
    cache.append(x, x)
    held = cache.state[0][0]
    keys, _ = cache.reserve(1)
    np.testing.assert_array_equal(np.array(keys[:, :, :4].view(mx.uint16)), np.array(held.view(mx.uint16)))


def test_appends_between_evaluated_states_reuse_the_buffers() -> None:
    for cache in (FullKVCache(), SlidingKVCache(64, 64)):
        filled(cache, 64)
        mx.eval(cache.state)
        before = [address(x) for x in cache._buffers]
        for first in (65, 97, 129):
            filled(cache, 32, first)
            mx.eval(cache.state)
        assert [address(x) for x in cache._buffers] == before


def test_a_long_prompt_grows_the_buffers_seldom_and_not_much_too_far() -> None:
    cache = FullKVCache()
    row = mx.zeros((1, 1, 512, 4))
    sizes = []
    for _ in range(400):
        cache.append(row, row)
        mx.eval(cache.state)
        sizes.append(cache.capacity)
        assert cache.offset <= cache.capacity <= cache.offset + cache.offset // 4 + 16384 + 256
    assert sizes[-1] - cache.offset <= 16384 + 256
    assert len(set(sizes)) <= 30


def test_pending_writes_happen_before_anything_is_read(cache: LayerCache) -> None:
    tags = np.arange(21, 24)[None]
    reads = {
        "state": lambda c: mx.eval(c.state),
        "copy": copy.deepcopy,
        "extract": lambda c: c.extract(0),
        "merge": lambda c: c.merge([c, c]),
        "append": lambda c: filled(c, 1, 24),
    }
    for name, read in reads.items():
        with kernel_writes() as kernel:
            c = copy.deepcopy(cache)
            kernel.write(c, tags)
            assert isinstance(kernel, KernelWrites) and c.last is not None
            read(c)
            assert c.last is None, name


def test_trimming_does_not_wait_for_pending_writes(cache: LayerCache) -> None:
    with kernel_writes() as kernel:
        kernel.write(cache, np.array([[21]]))
        cache.trim(1)
        assert cache.last is not None


def test_reserve_of_an_empty_cache_needs_shape_and_dtype() -> None:
    with pytest.raises(ValueError, match="reserve needs shape"):
        FullKVCache().reserve(1)
    keys, values = FullKVCache().reserve(3, shape=(2, KV, D), dtype=mx.bfloat16)
    assert keys.shape == values.shape == (2, KV, 256, D)
    assert keys.dtype == mx.bfloat16


@pytest.mark.parametrize(
    "cache",
    [FullKVCache(), QuantizedFullKVCache(32), TurboFullKVCache()],
    ids=["full", "quantised", "turbo"],
)
def test_reserve_refuses_what_the_buffers_do_not_hold(cache: LayerCache) -> None:
    """A kernel would write its own rows into them."""
    rows = mx.ones((2, 3, 5, 64))
    cache.append(rows, rows)
    cache.reserve(1, shape=(2, 3, 64), dtype=mx.float32)
    for shape, dtype in (
        ((2, 3, 64), mx.bfloat16),
        ((1, 3, 64), mx.float32),
        ((2, 1, 64), mx.float32),
        ((2, 3, 32), mx.float32),
    ):
        with pytest.raises(
            ValueError, match=r"the cache holds \(sequences, heads, width, dtype\) \(2, 3, 64, "
        ):
            cache.reserve(1, shape=shape, dtype=dtype)
    assert cache.offsets == [5, 5]


def test_buffers_for_kernels_have_eight_elements() -> None:
    """MLX passes smaller inputs in a way that Metal cannot write to."""
    full = FullKVCache()
    full.append(*[mx.random.normal((1, 1, 5, 64))] * 2)
    cache = full.to_quantized(64, 8)
    cache.trim(2)
    before = [np.array(x) for x in cache.state[0]]
    for part in (part for rows in cache.reserve(1) for part in rows):
        assert part.size >= 8
    for x, y in zip(cache.state[0], before, strict=True):
        np.testing.assert_array_equal(np.array(x), y)


def test_bytes_are_those_of_the_buffers() -> None:
    assert FullKVCache().nbytes == 0
    assert filled(FullKVCache(), 20).nbytes == 2 * 4 * KV * D * 256
    assert filled(SlidingKVCache(8, 4), 20).nbytes == 2 * 4 * KV * D * 12
    row = D + 2 * 4 * D // 32
    assert filled(QuantizedFullKVCache(32, 8), 20).nbytes == 2 * KV * row * 256


def test_a_buffer_that_is_replaced_whole_is_still_of_its_own_memory() -> None:
    packed = mx.arange(12 * 3 * KV * D).reshape(1, 12, 3 * KV, D).astype(mx.float32).transpose(0, 2, 1, 3)
    keys, values = packed[:, :KV], packed[:, KV : 2 * KV]
    cache = SlidingKVCache(8, 4)
    cache.append(keys, values)
    buffers = cache.state[0]
    for buffer, want in zip(buffers, (keys, values), strict=True):
        memory = np.array(buffer, copy=False)
        assert memory.flags.c_contiguous
        assert not np.shares_memory(memory, np.array(packed, copy=False))
        np.testing.assert_array_equal(memory, np.array(want))
