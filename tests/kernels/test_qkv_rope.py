"""Split of the fused projection, rotary embedding and append to a cache, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.custom_kernels.backend import REFERENCE, backend_name
from spark25_mlx.custom_kernels.qkv_rope import (
    qkv_rope,
    qkv_rope_append,
    qkv_rope_append_reference,
    qkv_rope_reference,
)
from spark25_mlx.custom_kernels.rope import rope_turns
from tests.kernels import test_rope
from tests.kernels.backends import Backend, recorded
from tests.kernels.rounding import DTYPES, assert_rounded_once, random, to_float64

QKVRope = Callable[..., tuple[mx.array, mx.array, mx.array]]
Append = Callable[..., tuple[mx.array, mx.array, mx.array]]
THETA = 10_000.0

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


@pytest.fixture
def run(backend: Backend) -> QKVRope:
    return backend.pick(qkv_rope, qkv_rope_reference)


@pytest.fixture
def append(backend: Backend) -> Append:
    return appending(backend)


def appending(backend: Backend) -> Append:
    """As the reference's signature is; the kernel's buffers are given back after its writes."""
    if backend.is_reference:
        return qkv_rope_append_reference

    def run(
        qkv: mx.array,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        lengths: mx.array,
        turns: mx.array,
        **heads: int,
    ) -> tuple[mx.array, mx.array, mx.array]:
        with backend.writing():
            q = qkv_rope_append(qkv, keys, values, positions, lengths, turns, qkv, **heads)
            mx.eval(q)
        return q, keys, values

    return run


def oracle(
    qkv: np.ndarray, positions: list[int], theta: float, dims: int, n_heads: int, n_kv_heads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Element by element: head h of [q | k | v] is the h-th block of D columns; of those of q and k the pairs
    (j, j + dims / 2) turn by position * inv_freq_j, from exact angles."""
    L = qkv.shape[1]
    heads, half = n_heads + 2 * n_kv_heads, dims // 2
    D = qkv.shape[2] // heads
    cos, sin = (
        np.stack(part)
        for part in zip(
            *(test_rope.oracle(theta, dims, [start + i for i in range(L)]) for start in positions),
            strict=True,
        )
    )
    blocks = [qkv[:, :, h * D : (h + 1) * D].copy() for h in range(heads)]
    for block in blocks[: n_heads + n_kv_heads]:
        for j in range(half):
            first, second = block[..., j].copy(), block[..., j + half].copy()
            block[..., j] = first * cos[..., j] - second * sin[..., j]
            block[..., j + half] = second * cos[..., j] + first * sin[..., j]
    stacked = np.stack(blocks, axis=1)
    return (
        stacked[:, :n_heads],
        stacked[:, n_heads : n_heads + n_kv_heads],
        stacked[:, n_heads + n_kv_heads :],
    )


def assert_split_and_rotated(
    run: QKVRope, qkv: mx.array, positions: list[int], dims: int, n_heads: int, n_kv_heads: int
) -> None:
    turns = rope_turns(THETA, dims)
    actual = run(qkv, mx.array(positions, dtype=mx.int32), turns, n_heads=n_heads, n_kv_heads=n_kv_heads)
    exact = oracle(to_float64(qkv), positions, THETA, dims, n_heads, n_kv_heads)
    # Phases, two products and a sum in fp32: an absolute error in units of the pair's length.
    error = 5e-7 * float(np.abs(to_float64(qkv)).max())
    for tensor, wanted in zip(actual[:2], exact[:2], strict=True):
        assert_rounded_once(tensor, wanted, qkv.dtype, error)
        np.testing.assert_array_equal(to_float64(tensor)[..., dims:], wanted[..., dims:])
    assert actual[2].dtype == qkv.dtype
    np.testing.assert_array_equal(to_float64(actual[2]), exact[2])


@dtypes
@pytest.mark.parametrize(
    ("L", "n_heads", "n_kv_heads", "D", "dims", "positions"),
    [
        (1, 16, 4, 256, 64, [1_048_575]),  # a decode step of the 4B at its last position: full layer,
        (1, 16, 4, 256, 256, [1_048_575]),  # sliding layer
        (3, 4, 1, 32, 8, [0, 511]),
        (3, 4, 1, 32, 32, [63, 7]),
        (7, 3, 3, 96, 12, [100]),
        (5, 6, 2, 64, 62, [3, 262_140, 0]),
        (33, 2, 1, 128, 32, [32_000]),
        (2, 5, 1, 160, 160, [2_147_000_000]),  # far beyond what any checkpoint was trained for
        (1, 1, 1, 32, 2, [1]),
    ],
)
def test_random_values(
    run: QKVRope,
    dtype: mx.Dtype,
    L: int,
    n_heads: int,
    n_kv_heads: int,
    D: int,
    dims: int,
    positions: list[int],
) -> None:
    qkv = random((len(positions), L, (n_heads + 2 * n_kv_heads) * D), dtype, 0)
    assert_split_and_rotated(run, qkv, positions, dims, n_heads, n_kv_heads)


@pytest.mark.fallback
@dtypes
@pytest.mark.parametrize(("D", "dims"), [(2, 2), (48, 12)])
def test_widths_without_a_kernel(run: QKVRope, dtype: mx.Dtype, D: int, dims: int) -> None:
    assert_split_and_rotated(run, random((2, 3, 5 * D), dtype, 0), [7, 100], dims, 3, 1)


@dtypes
def test_columns_of_a_wider_array(run: QKVRope, dtype: mx.Dtype) -> None:
    qkv = random((2, 3, 6 * 32 + 4), dtype, 0)[..., 4:]
    assert_split_and_rotated(run, qkv, [5, 900], 32, 4, 1)


def test_position_zero_is_a_plain_split(run: QKVRope) -> None:
    """Column numbers come back where the heads say."""
    qkv = mx.arange(6 * 32, dtype=mx.float32).reshape(1, 1, -1)
    q, k, v = run(qkv, mx.array([0]), rope_turns(THETA, 8), n_heads=4, n_kv_heads=1)
    np.testing.assert_array_equal(np.array(q)[0, :, 0], np.arange(128).reshape(4, 32))
    np.testing.assert_array_equal(np.array(k)[0, :, 0], np.arange(128, 160)[None])
    np.testing.assert_array_equal(np.array(v)[0, :, 0], np.arange(160, 192)[None])


def test_sense_of_the_rotation(run: QKVRope) -> None:
    """One radian at position 1: (1, 0) -> (cos 1, sin 1), pairs half of the rotated dimensions apart."""
    head = mx.zeros((1, 1, 32)).at[..., 0].add(1.0)
    q, k, v = run(mx.tile(head, (1, 1, 3)), mx.array([1]), rope_turns(THETA, 8), n_heads=1, n_kv_heads=1)
    wanted = np.zeros(32)
    wanted[0], wanted[4] = math.cos(1.0), math.sin(1.0)
    for tensor in (q, k):
        np.testing.assert_allclose(np.array(tensor).flatten(), wanted, atol=1e-7)
    np.testing.assert_array_equal(np.array(v), np.array(head)[None])


def append_oracle(
    buffer: np.ndarray, new: np.ndarray, positions: list[int], lengths: list[int]
) -> np.ndarray:
    """Token by token: the row of position p is p modulo the capacity; padding is not written."""
    buffer = buffer.copy()
    for b, (start, length) in enumerate(zip(positions, lengths, strict=True)):
        for i in range(min(length, new.shape[2])):
            buffer[b, :, (start + i) % buffer.shape[2]] = new[b, :, i]
    return buffer


def assert_appended(
    append: Append,
    qkv: mx.array,
    capacity: int,
    positions: list[int],
    lengths: list[int],
    dims: int,
    n_heads: int,
    n_kv_heads: int,
) -> None:
    """Queries, the rows written, and those that must stay as they are."""
    D = qkv.shape[2] // (n_heads + 2 * n_kv_heads)
    shape = (len(positions), n_kv_heads, capacity, D)
    keys, values = random(shape, qkv.dtype, 1), random(shape, qkv.dtype, 2)
    before = to_float64(keys), to_float64(values)
    starts, counts = (mx.array(numbers, dtype=mx.int32) for numbers in (positions, lengths))
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads}
    q, *after = append(qkv, keys, values, starts, counts, rope_turns(THETA, dims), **heads)

    exact_q, *new = oracle(to_float64(qkv), positions, THETA, dims, n_heads, n_kv_heads)
    error = 5e-7 * float(np.abs(to_float64(qkv)).max())
    assert_rounded_once(q, exact_q, qkv.dtype, error)
    for buffer, old, rows in zip(after, before, new, strict=True):
        exact = append_oracle(old, rows, positions, lengths)
        assert_rounded_once(buffer, exact, qkv.dtype, error)
        untouched = append_oracle(np.zeros(shape, bool), np.ones(rows.shape, bool), positions, lengths) == 0
        np.testing.assert_array_equal(to_float64(buffer)[untouched], old[untouched])


@dtypes
@pytest.mark.parametrize(
    ("L", "capacity", "positions", "lengths"),
    [
        (1, 7, [0, 6], [1, 1]),
        (1, 4, [4, 1_048_575], [1, 1]),
        (3, 7, [5, 13], [3, 2]),  # across the end of a ring
        (3, 16, [0, 4], [3, 0]),  # a row of nothing but padding
        (9, 4, [2, 1], [9, 3]),  # more tokens than rows: the last ones stay
        (9, 4, [0, 1_048_570], [4, 5]),  # exactly the rows, and one token more
        (5, 1, [3], [4]),
        (8, 600, [510, 511, 0, 595], [8, 1, 5, 8]),
    ],
)
def test_append(
    append: Append, dtype: mx.Dtype, L: int, capacity: int, positions: list[int], lengths: list[int]
) -> None:
    assert_appended(
        append, random((len(positions), L, 4 * 32), dtype, 0), capacity, positions, lengths, 8, 2, 1
    )


@dtypes
@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "D", "dims"), [(16, 4, 256, 64), (3, 3, 96, 96), (5, 1, 160, 12)]
)
def test_append_of_many_heads(
    append: Append, dtype: mx.Dtype, n_heads: int, n_kv_heads: int, D: int, dims: int
) -> None:
    qkv = random((2, 3, (n_heads + 2 * n_kv_heads) * D), dtype, 0)
    assert_appended(append, qkv, 5, [1_000_003, 2], [3, 1], dims, n_heads, n_kv_heads)


def test_reads_between_appends(backend: Backend) -> None:
    """Forty steps of a ring in one lazy graph: each reader sees its own step's rows, and no later ones."""
    if backend.is_reference:
        pytest.skip("writes nothing in place")
    capacity, steps, D = 4, 40, 32
    turns, one = rope_turns(THETA, D), mx.array([1], dtype=mx.int32)
    keys, values = mx.zeros((1, 1, capacity, D)), mx.zeros((1, 1, capacity, D))
    mx.eval(keys, values)
    rows = random((steps, 1, 1, 3 * D), mx.float32, 0)
    after, seen = rows[0], []
    with backend.writing():
        for i in range(steps):
            q = qkv_rope_append(
                rows[i],
                keys,
                values,
                mx.array([i], dtype=mx.int32),
                one,
                turns,
                after,
                n_heads=1,
                n_kv_heads=1,
            )
            # Binds q, as whoever reads the buffers must.
            after = values + 0.0 * mx.max(q)
            seen.append(after)
        mx.eval(seen)
    wanted = np.zeros((capacity, D))
    for i, out in enumerate(seen):
        wanted[i % capacity] = to_float64(rows)[i, 0, 0, 2 * D :]
        np.testing.assert_array_equal(to_float64(out)[0, 0], wanted, err_msg=f"step {i}")


def test_after_is_bound() -> None:
    """The launch depends on the last reader's output, which no result of it shows."""
    buffers = mx.zeros((1, 1, 4, 32)), mx.zeros((1, 1, 4, 32))
    one, after = mx.array([1], dtype=mx.int32), mx.zeros(3)
    with recorded() as launches:
        qkv_rope_append(
            mx.zeros((1, 1, 96)), *buffers, one, one, rope_turns(THETA, 8), after, n_heads=1, n_kv_heads=1
        )
    assert [any(x is after for x in inputs) for _, inputs in launches] == [True]


def test_append_without_a_kernel() -> None:
    """Refused before anything is written."""
    if backend_name() != REFERENCE:
        pytest.skip("a kernel runs here")
    buffers = mx.zeros((1, 1, 4, 32)), mx.zeros((1, 1, 4, 32))
    one = mx.array([1], dtype=mx.int32)
    with pytest.raises(RuntimeError, match="needs a GPU kernel, and none runs here"):
        qkv_rope_append(
            mx.zeros((1, 1, 96)), *buffers, one, one, rope_turns(THETA, 8), one, n_heads=1, n_kv_heads=1
        )


def test_append_reference_changes_nothing() -> None:
    """The given buffers keep their contents: the new ones are returned."""
    keys, values = mx.ones((1, 1, 4, 32)), mx.ones((1, 1, 4, 32))
    one, turns = mx.array([1], dtype=mx.int32), rope_turns(THETA, 8)
    qkv_rope_append_reference(
        random((1, 1, 96), mx.float32, 0), keys, values, one, one, turns, n_heads=1, n_kv_heads=1
    )
    assert mx.all(keys == 1).item()
    assert mx.all(values == 1).item()
