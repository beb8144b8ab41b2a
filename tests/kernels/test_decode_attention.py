"""Attention of a few new tokens over a cache that they join, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.custom_kernels.backend import REFERENCE, backend_name
from spark25_mlx.custom_kernels.decode_attention import (
    Shape,
    bind_decode_attention,
    decode_attention,
    decode_attention_reference,
)
from spark25_mlx.custom_kernels.rope import rope_table, rope_turns
from tests.kernels import test_head_gate, test_qkv_rope
from tests.kernels.backends import Backend, recorded
from tests.kernels.rounding import DTYPES, assert_rounded_once, random, rounded, to_float64, ulp

THETA = 10_000.0
# Of the largest value: fp32 sums, and queries that fp32 phases round to the other neighbour.
FP32_ERROR = {mx.float32: 2e-6, mx.float16: 2e-4, mx.bfloat16: 1.5e-3}

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        positions: of the first new token of each sequence.
        dims: rotated dimensions.
        splits: threadgroups that share the keys, each tried in turn; None for what the positions ask for.
        bits, group: format of the cache; 16 and 0 for a plain one.
        matrix: whether products of matrices are wanted.
    """

    positions: list[int]
    L: int = 1
    n_heads: int = 1
    n_kv_heads: int = 1
    D: int = 32
    dims: int = 32
    capacity: int = 64
    window: int | None = None
    mode: str = "sigmoid"
    dtype: mx.Dtype = mx.float32
    splits: tuple[int | None, ...] = (1, 8)
    bits: int = 16
    group: int = 0
    matrix: bool = True

    @property
    def shape(self) -> Shape:
        heads = self.n_heads, self.n_kv_heads, self.D, self.dims
        kv_format = self.bits, self.group
        return Shape(
            self.dtype, len(self.positions), self.L, *heads, self.window, self.mode, *kv_format, self.matrix
        )

    def sees(self, position: int) -> range:
        """Positions of the keys that the token at `position` sees."""
        return range(0 if self.window is None else max(0, position - self.window + 1), position + 1)


@dataclass(frozen=True)
class Inputs:
    """Keys and values are one buffer each, or the three of a quantised cache."""

    qkv: mx.array
    scores: mx.array
    keys: Any
    values: Any


def make_inputs(case: Case, unseen: float, seed: int = 0) -> Inputs:
    """Random inputs; rows of the buffers that no token may see hold `unseen`."""
    B, heads = len(case.positions), case.n_heads + 2 * case.n_kv_heads
    seen = np.zeros((B, 1, case.capacity, 1), bool)
    for b, start in enumerate(case.positions):
        for position in range(case.sees(start).start, start):
            seen[b, :, position % case.capacity] = True
    shape = (B, case.n_kv_heads, case.capacity, case.D)
    keys, values = (
        mx.where(mx.array(seen), random(shape, case.dtype, seed + i, 1.5), mx.array(unseen, case.dtype))
        for i in (2, 3)
    )
    mx.eval(keys, values)
    return Inputs(
        random((B, case.L, heads * case.D), case.dtype, seed, 1.5),
        random((B, case.L, case.n_heads), case.dtype, seed + 1, 2.0),
        keys,
        values,
    )


def run(backend: Backend, case: Case, inputs: Inputs, splits: int | None = None) -> tuple[mx.array, Any, Any]:
    """(out, keys buffers, values buffers) after the call."""
    arguments = (inputs.qkv, inputs.scores, inputs.keys, inputs.values)
    rest = mx.array(case.positions, dtype=mx.int32), rope_turns(THETA, case.dims)
    options: dict[str, Any] = {
        "n_heads": case.n_heads,
        "window": case.window,
        "mode": case.mode,
        "kv_format": (case.bits, case.group),
    }
    if backend.is_reference:
        return decode_attention_reference(*arguments, *rest, **options)
    with backend.writing():
        if splits is None:
            options |= {"most_keys": max(case.positions), "matrix": case.matrix}
            out = decode_attention(*arguments, *rest, inputs.qkv, **options)
        else:
            table = rope_table(rest[0], case.L, rest[1])
            out = bind_decode_attention(case.shape, splits)(*arguments, *table, inputs.qkv)
        mx.eval(out)
    return out, inputs.keys, inputs.values


def oracle(
    case: Case, qkv: np.ndarray, keys: np.ndarray, values: np.ndarray, round_rotated: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Head by head and token by token, with the key of position p in row p modulo the capacity.

    Returns:
        (attention before the gate [B, n_heads, L, D], new keys buffer, unrounded, new values buffer).
    """
    q, k, v = test_qkv_rope.oracle(qkv, case.positions, THETA, case.dims, case.n_heads, case.n_kv_heads)
    lengths = [case.L] * len(case.positions)
    new_keys = test_qkv_rope.append_oracle(keys, k, case.positions, lengths)
    new_values = test_qkv_rope.append_oracle(values, v, case.positions, lengths)
    if round_rotated:
        q, k = rounded(q, case.dtype), rounded(k, case.dtype)
    keys = test_qkv_rope.append_oracle(keys, k, case.positions, lengths)
    return attention(case, q, keys, new_values), new_keys, new_values


def attention(case: Case, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Before the gate, over buffers that hold the new tokens: [B, n_heads, L, D]."""
    out = np.empty((len(case.positions), case.n_heads, case.L, case.D))
    for b, start in enumerate(case.positions):
        for i in range(case.L):
            rows = [p % case.capacity for p in case.sees(start + i)]
            for h in range(case.n_heads):
                kv = h // (case.n_heads // case.n_kv_heads)
                weights = keys[b, kv, rows] @ q[b, h, i] / math.sqrt(case.D)
                weights = np.exp(weights - weights.max())
                out[b, h, i] = weights / weights.sum() @ values[b, kv, rows]
    return out


def check(backend: Backend, case: Case) -> None:
    for splits in (None,) if backend.is_reference else case.splits:
        check_call(backend, case, splits)


def check_call(backend: Backend, case: Case, splits: int | None) -> None:
    """The result, the rows written, and those that must stay as they are."""
    # What a kernel reads in vain may be anything; the reference multiplies it by 0.
    inputs = make_inputs(case, 1e3 if backend.is_reference else math.nan)
    qkv, keys, values = (to_float64(x) for x in (inputs.qkv, inputs.keys, inputs.values))
    attention, *buffers = oracle(case, qkv, keys, values)
    out, *after = run(backend, case, inputs, splits)

    exact = test_head_gate.oracle(attention, to_float64(inputs.scores), case.mode)
    gates = test_head_gate.oracle(np.ones_like(attention), to_float64(inputs.scores), case.mode)
    largest = float(np.nanmax(np.abs(buffers[1]), where=np.abs(buffers[1]) < 1e3, initial=0.0))
    error = FP32_ERROR[case.dtype] * largest * np.abs(gates)
    if backend.is_reference:
        # Rounds before the gate, too.
        error = error + ulp(exact, case.dtype)
    assert_rounded_once(out, exact, case.dtype, error)

    written = np.zeros(keys.shape, bool)
    for b, start in enumerate(case.positions):
        for position in range(start, start + case.L):
            written[b, :, position % case.capacity] = True
    rotation = 5e-7 * np.abs(qkv).max()
    for buffer, before, wanted in zip(after, (keys, values), buffers, strict=True):
        assert buffer.dtype == case.dtype
        np.testing.assert_array_equal(to_float64(buffer)[~written], before[~written])
        rows = mx.array(to_float64(buffer)[written].astype(np.float32)).astype(case.dtype)
        assert_rounded_once(rows, wanted[written], case.dtype, rotation)


SHAPES = [
    # A full layer of the 4B, its last free row; a ring that has wrapped, its window exactly full.
    Case([19], n_heads=16, n_kv_heads=4, D=256, dims=64, capacity=20),
    Case([29], n_heads=16, n_kv_heads=4, D=256, dims=256, capacity=8, window=8),
    Case([0], n_heads=2, dims=8, capacity=4),  # nothing cached
    Case([0, 8, 9, 40], n_heads=4, capacity=16, window=9),  # up to, at and past the window
    Case([0, 17, 32], L=8, n_heads=4, dims=8, capacity=40),
    Case([3, 5, 100], L=8, n_heads=6, n_kv_heads=2, D=64, dims=64, capacity=16, window=9),
    Case([0, 30], L=3, n_heads=3, n_kv_heads=3, D=96, dims=12, capacity=12, window=1),
]


@dtypes
@pytest.mark.parametrize("mode", ["sigmoid", "silu"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"at {case.positions}")
def test_shapes(backend: Backend, dtype: mx.Dtype, mode: str, case: Case) -> None:
    check(backend, replace(case, dtype=dtype, mode=mode))


@dtypes
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"at {case.positions}")
def test_with_metals_registers(
    backend: Backend, dtype: mx.Dtype, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer simdgroups and keys at once than elsewhere."""
    monkeypatch.setattr("spark25_mlx.custom_kernels.decode_attention.backend_name", lambda: "metal")
    check(backend, replace(case, dtype=dtype))
    check(backend, replace(case, dtype=dtype, D=256, splits=(8,)))


@dtypes
@pytest.mark.parametrize("D", [32, 64, 96, 128, 160, 256])
def test_head_dims(backend: Backend, dtype: mx.Dtype, D: int) -> None:
    check(backend, Case([9, 40], L=2, n_heads=2, D=D, dims=D // 4 * 2, dtype=dtype))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_groups(backend: Backend, group: int, n_kv_heads: int) -> None:
    n_heads = group * n_kv_heads
    check(backend, Case([0, 9, 40], L=2, n_heads=n_heads, n_kv_heads=n_kv_heads, dtype=mx.bfloat16))
    check(backend, Case([9, 40], L=1, n_heads=n_heads, n_kv_heads=n_kv_heads, capacity=9, window=8))


@pytest.mark.parametrize("L", range(1, 9))
def test_tokens_of_one_call(backend: Backend, L: int) -> None:
    """In a full buffer, its last row included, and in a ring with just the room that they need."""
    check(backend, Case([0, 1, 30, 64 - L], L=L, n_heads=2))
    window = 9
    check(backend, Case([0, 2, 9, 57], L=L, n_heads=2, capacity=window + L - 1, window=window))


@pytest.mark.parametrize("L", [1, 3, 8])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
def test_every_position_of_a_small_ring(backend: Backend, L: int, window: int) -> None:
    """Before, at and after each of the first wraps."""
    capacity = window + L - 1
    check(backend, Case(list(range(2 * capacity + 3)), L=L, capacity=capacity, window=window))


@pytest.mark.parametrize("slack", [0, 4])
@pytest.mark.parametrize("window", [511, 512, 513])
def test_edges_of_a_window(backend: Backend, window: int, slack: int) -> None:
    capacity, L = window + slack, 1 + min(slack, 3)
    edges = [window - 2, window - 1, window, window + 1, capacity, 2 * capacity - 1, 5 * capacity + 1]
    check(backend, Case(edges, L=L, capacity=capacity, window=window))


@pytest.mark.parametrize("splits", [1, 8, 16, 32, 64])
def test_splits(backend: Backend, splits: int) -> None:
    """More parts than keys, and parts of several rounds."""
    check(backend, Case([0, 1, 5, 31, 32, 33, 200], n_heads=2, capacity=202, L=2, splits=(splits,)))


@dtypes
@pytest.mark.parametrize(("n_keys", "D"), [(640, 64), (641, 64), (5_000, 128)])
def test_many_keys(backend: Backend, dtype: mx.Dtype, n_keys: int, D: int) -> None:
    check(backend, Case([n_keys], n_heads=2, D=D, dims=32, capacity=n_keys + 1, dtype=dtype, splits=(None,)))


def test_positions_near_a_million(backend: Backend) -> None:
    """In a ring; the rows of a full buffer would not fit into a test."""
    last = 1_048_575
    check(backend, Case([last - 2, 1_000_000], L=3, n_heads=2, capacity=12, window=9))


@dtypes
def test_as_accurate_as_mlx(backend: Backend, dtype: mx.Dtype) -> None:
    """The kernel's distance to float64, beside that of MLX's own attention of the same dtype."""
    if backend.is_reference:
        pytest.skip("a claim about the kernel")
    case = Case([999], n_heads=4, D=128, dims=128, capacity=1_000, dtype=dtype)
    inputs = make_inputs(case, 0.0)
    # An open gate: 1 to the last digit.
    inputs = replace(inputs, scores=mx.full(inputs.scores.shape, 40.0, dtype=dtype))
    qkv, keys, values = (to_float64(x) for x in (inputs.qkv, inputs.keys, inputs.values))
    exact, exact_keys, exact_values = oracle(case, qkv, keys, values, round_rotated=False)
    ours = to_float64(run(backend, case, inputs)[0]).reshape(exact.shape)

    with mx.stream(mx.cpu):
        q, k, v = (
            mx.array(rounded(x, dtype).astype(np.float32)).astype(dtype)
            for x in (
                test_qkv_rope.oracle(qkv, case.positions, THETA, case.dims, 4, 1)[0],
                exact_keys,
                exact_values,
            )
        )
        mlx = mx.fast.scaled_dot_product_attention(q, k, v, scale=case.D**-0.5)
        theirs = to_float64(mlx)
    for name, norm in (("largest", np.max), ("mean square", lambda x: np.sqrt(np.mean(np.square(x))))):
        a, b = (float(norm(np.abs(x - exact))) for x in (ours, theirs))
        print(f"\n{dtype} {name} error: {backend.name} {a:.3g}, mlx {b:.3g}")
        assert a <= b


def test_steps_of_one_graph(backend: Backend) -> None:
    """Thirty steps in one lazy graph: `after` keeps each write behind the reads of the step before."""
    case = Case([0], n_heads=2, capacity=8, window=8)
    steps = 30
    rows = [make_inputs(case, 0.0, seed=10 * i) for i in range(steps)]
    keys, values = mx.zeros((1, 1, 8, 32)), mx.zeros((1, 1, 8, 32))
    mx.eval(keys, values)
    wide_keys, wide_values = np.zeros(keys.shape), np.zeros(values.shape)
    turns = rope_turns(THETA, case.dims)
    options: dict[str, Any] = {"n_heads": 2, "window": 8, "mode": "sigmoid"}
    outs, after = [], rows[0].qkv
    with backend.writing():
        for i, row in enumerate(rows):
            arguments = row.qkv, row.scores, keys, values, mx.array([i], dtype=mx.int32), turns
            if backend.is_reference:
                after, keys, values = decode_attention_reference(*arguments, **options)
            else:
                after = decode_attention(*arguments, after, **options, most_keys=i)
            outs.append(after)
        mx.eval(outs)
    for i, (row, out) in enumerate(zip(rows, outs, strict=True)):
        step = replace(case, positions=[i])
        attention, wide_keys, wide_values = oracle(step, to_float64(row.qkv), wide_keys, wide_values)
        exact = test_head_gate.oracle(attention, to_float64(row.scores), "sigmoid")
        np.testing.assert_allclose(to_float64(out), exact, atol=2e-5, err_msg=f"step {i}")


def test_after_is_bound() -> None:
    """The launch depends on the last reader's output, which no result of it shows."""
    case = Case([0], n_heads=2)
    inputs, after = make_inputs(case, 0.0), mx.zeros(3)
    arguments = inputs.qkv, inputs.scores, inputs.keys, inputs.values, mx.array([0], dtype=mx.int32)
    with recorded() as launches:
        decode_attention(
            *arguments, rope_turns(THETA, 32), after, n_heads=2, window=None, mode="silu", most_keys=0
        )
    assert any(x is after for _, inputs in launches for x in inputs)


def test_without_a_kernel() -> None:
    """Refused before anything is written."""
    if backend_name() != REFERENCE:
        pytest.skip("a kernel runs here")
    case = Case([0], n_heads=2)
    with pytest.raises(RuntimeError, match="needs a GPU kernel, and none runs here"):
        run(Backend("gpu"), case, make_inputs(case, 0.0))
