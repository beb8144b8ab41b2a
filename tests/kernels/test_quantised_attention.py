"""`decode_attention` over caches in MLX's affine format, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from spark25_mlx.custom_kernels.backend import Kernel, suspended, without
from spark25_mlx.custom_kernels.decode_attention import TURBO, bind_decode_attention, can_decode
from spark25_mlx.custom_kernels.turbo import turbo_quantize
from tests import metal_sim
from tests.kernels import test_decode_attention, test_head_gate, test_qkv_rope, test_turbo
from tests.kernels.backends import SIMULATOR, Backend, simulated
from tests.kernels.rounding import DTYPES, assert_rounded_once, random, rounded, to_float64, ulp
from tests.kernels.test_decode_attention import FP32_ERROR, THETA, Inputs, attention, run

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


@dataclass(frozen=True)
class Case(test_decode_attention.Case):
    """One call over a quantised cache, with half of the dimensions rotated."""

    D: int = 64
    dtype: mx.Dtype = mx.bfloat16
    bits: int = 8
    group: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", self.D // 2)


def quantise(x: mx.array, case: Case) -> tuple[mx.array, ...]:
    with mx.stream(mx.cpu):
        if case.shape.turbo:
            packed = turbo_quantize(x)
        else:
            packed = tuple(mx.quantize(x, group_size=case.group, bits=case.bits))
        mx.eval(packed)
    return packed


def decoded(rows: tuple[mx.array, ...], case: Case) -> np.ndarray:
    """From the codes: scale * code + bias, or a level times the row's scale, rotated back."""
    codes, scales, *biases = rows
    shifts = np.arange(0, 32, case.bits, dtype=np.uint32)
    numbers = (np.array(codes)[..., None] >> shifts) & np.uint32((1 << case.bits) - 1)
    numbers = numbers.reshape(*codes.shape[:-1], case.D)
    if case.shape.turbo:
        return test_turbo.levels()[numbers] * to_float64(scales) @ test_turbo.rotation(case.D)
    scale, bias = (np.repeat(to_float64(x), case.group, axis=-1) for x in (scales, *biases))
    return scale * numbers + bias


def make_rows(case: Case, seed: int, unseen: float) -> tuple[mx.array, ...]:
    """A random buffer, quantised; rows that no token may see have scales that are `unseen`."""
    B = len(case.positions)
    codes, scales, *biases = quantise(
        random((B, case.n_kv_heads, case.capacity, case.D), case.dtype, seed, 1.5), case
    )
    before = np.arange(case.capacity) < np.array(case.positions)[:, None]
    seen = mx.array(before[:, None, :, None])
    scales = mx.where(seen, scales, mx.array(unseen, case.dtype))
    mx.eval(scales)
    return codes, scales, *biases


def check(backend: Backend, case: Case) -> None:
    for splits in (None,) if backend.is_reference else case.splits:
        check_call(backend, case, splits)


def check_call(backend: Backend, case: Case, splits: int | None) -> None:
    """The rows written, those that must stay as they are, and attention over what is stored."""
    B, heads = len(case.positions), case.n_heads + 2 * case.n_kv_heads
    qkv = random((B, case.L, heads * case.D), case.dtype, 0, 1.5)
    scores = random((B, case.L, case.n_heads), case.dtype, 1, 2.0)
    # What a kernel reads in vain may be anything; the reference multiplies it by 0.
    keys, values = (make_rows(case, seed, 1e3 if backend.is_reference else math.nan) for seed in (2, 3))
    before = [[np.array(x.astype(mx.float32)) for x in rows] for rows in (keys, values)]
    out, *after = run(backend, case, Inputs(qkv, scores, keys, values), splits)

    q, k, v = test_qkv_rope.oracle(
        to_float64(qkv), case.positions, THETA, case.dims, case.n_heads, case.n_kv_heads
    )
    written = np.zeros((B, case.capacity), bool)
    for b, start in enumerate(case.positions):
        written[b, start : start + case.L] = True
    for rows, old in zip(after, before, strict=True):
        for new, was in zip(rows, old, strict=True):
            same = np.array(new.astype(mx.float32)).transpose(0, 2, 1, 3)[~written]
            np.testing.assert_array_equal(same, was.transpose(0, 2, 1, 3)[~written])

    key_rows, value_rows = (decoded(rows, case) for rows in after)
    steps = np.zeros(1)
    if case.shape.turbo:
        for new, row in ((after[0], k), (after[1], v)):
            for b, start in enumerate(case.positions):
                own = tuple(x[b, :, start : start + case.L] for x in new)
                # Keys are rounded after the rotary embedding.
                test_turbo.assert_nearest(own, rounded(row[b], case.dtype), 0.0 if row is v else 2.0**-7)
    else:
        # Values are quantised bit for bit as MLX's CPU does it; keys are rotated and rounded before.
        exact_values = quantise(mx.array(v.astype(np.float32)).astype(case.dtype), case)
        steps = np.repeat(np.abs(to_float64(after[0][1])), case.group, axis=-1)
        for b, start in enumerate(case.positions):
            where = slice(start, start + case.L)
            for new, exact in zip(after[1], exact_values, strict=True):
                np.testing.assert_array_equal(to_float64(new)[b, :, where], to_float64(exact)[b])
            # Half a step, an edge that is not met, and 255 steps of a rounded scale.
            assert np.all(
                np.abs(key_rows[b, :, where] - k[b]) <= 1.6 * steps[b, :, where] + ulp(k[b], case.dtype)
            )

    exact = attention(case, rounded(q, case.dtype), key_rows, value_rows)
    gates = test_head_gate.oracle(np.ones_like(exact), to_float64(scores), case.mode)
    largest = max(
        np.nanmax(np.abs(value_rows[b, :, : start + case.L])) for b, start in enumerate(case.positions)
    )
    # Unless sums are scaled, not values, decoding rounds the bias of 8 bits by 2^-9 of a step.
    rounds = case.bits == 8 and not case.shape.by_matrix
    step = 2.0**-9 * np.nanmax(steps[np.isfinite(steps) & (steps < 1e3)]) if rounds else 0.0
    error = (FP32_ERROR[case.dtype] * largest + step * (1 + 2 * largest)) * np.abs(gates)
    exact = test_head_gate.oracle(exact, to_float64(scores), case.mode)
    if backend.is_reference:
        # Rounds before the gate, too.
        error = error + ulp(exact, case.dtype)
    assert_rounded_once(out, exact, case.dtype, error)


# Both kernels, sums of a lane and products of matrices, and the latter with rotated rows.
kv_formats = pytest.mark.parametrize("kv_format", [(8, 32), (4, 32), (8, 64), (4, 64), TURBO], ids=str)

FORMATS = [
    (32, 8, 32),
    (32, 4, 32),
    (64, 8, 32),
    (64, 8, 64),
    (64, 4, 64),
    (128, 8, 128),
    (128, 4, 32),
    (256, 8, 64),
    (256, 4, 64),
    (256, 4, 128),
]


@dtypes
@pytest.mark.parametrize(("D", "bits", "group"), FORMATS)
def test_formats(backend: Backend, dtype: mx.Dtype, D: int, bits: int, group: int) -> None:
    case = Case([9, 0, 40], L=2, n_heads=2, D=D, bits=bits, group=group, dtype=dtype)
    check(backend, case)
    if case.shape.matrix_fits:
        check(backend, replace(case, matrix=False))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_turbo_of_all_widths(backend: Backend, dtype: mx.Dtype, D: int) -> None:
    bits, group = TURBO
    check(backend, Case([9, 0, 40], L=2, n_heads=2, D=D, bits=bits, group=group, dtype=dtype))
    # Enough queries that one of them would show it if they were rounded to halves.
    many = {"n_heads": 12, "n_kv_heads": 2, "capacity": 21, "mode": "silu"}
    check(backend, Case([16, 16], L=4, D=D, bits=bits, group=group, dtype=dtype, **many))


@kv_formats
@pytest.mark.parametrize("L", range(1, 9))
def test_tokens_of_one_call(backend: Backend, L: int, kv_format: tuple[int, int]) -> None:
    """Ragged, up to the buffer's last row."""
    bits, group = kv_format
    check(backend, Case([0, 1, 30, 64 - L], L=L, n_heads=2, bits=bits, group=group))


@kv_formats
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(1, 1), (3, 1), (4, 2), (8, 1), (16, 4)])
def test_groups(backend: Backend, n_heads: int, n_kv_heads: int, kv_format: tuple[int, int]) -> None:
    bits, group = kv_format
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads}
    check(backend, Case([0, 9, 40], **heads, mode="silu", bits=bits, group=group))


@kv_formats
@pytest.mark.parametrize("splits", [1, 2, 8, 64])
def test_splits(backend: Backend, splits: int, kv_format: tuple[int, int]) -> None:
    bits, group = kv_format
    positions = [0, 5, 15, 16, 17, 31, 32, 33, 200]
    check(backend, Case(positions, n_heads=2, capacity=202, L=2, splits=(splits,), group=group, bits=bits))


@pytest.mark.parametrize("n_keys", [2_000, 5_000])
@pytest.mark.parametrize("kv_format", [(8, 64), (4, 64), TURBO], ids=str)
def test_many_keys(backend: Backend, kv_format: tuple[int, int], n_keys: int) -> None:
    bits, group = kv_format
    case = Case([n_keys], n_heads=4, D=256, capacity=n_keys + 1, bits=bits, group=group, splits=(None,))
    check(backend, case)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "fp16"])
def test_matrices_of_large_and_small_numbers(backend: Backend, dtype: mx.Dtype, bits: int) -> None:
    if backend.is_reference:
        pytest.skip("about the kernel")
    check_magnitudes(backend, dtype, bits)


def check_magnitudes(backend: Backend, dtype: mx.Dtype, bits: int) -> None:
    """Halves have a narrow range: queries and values far from 1, and with them weights of all sizes."""
    case = Case([70], n_heads=2, capacity=71, bits=bits, group=64, dtype=dtype)
    for of_queries, of_keys, of_values in ((1e3, 1e-3, 1e-4), (1e-3, 1e3, 1e3), (8.0, 2.0, 1.0)):
        scales = mx.repeat(mx.array([of_queries] * 2 + [of_keys, of_values]), case.D)
        qkv = (random((1, 1, 4 * case.D), mx.float32, 0) * scales).astype(dtype)
        keys, values = (
            quantise(random((1, 1, case.capacity, case.D), dtype, seed, scale), case)
            for seed, scale in ((2, of_keys), (3, of_values))
        )
        # An open gate: 1 to the last digit.
        scores = mx.full((1, 1, 2), 40.0, dtype=dtype)
        out, keys, values = run(backend, case, Inputs(qkv, scores, keys, values), 2)
        q = rounded(test_qkv_rope.oracle(to_float64(qkv), [70], THETA, case.dims, 2, 1)[0], dtype)
        stored = decoded(values, case)
        exact = attention(case, q, decoded(keys, case), stored)
        # Queries that fp32 phases round to the other neighbour shift scores by as much.
        error = np.abs(stored).max() * FP32_ERROR[dtype] * max(1.0, of_queries * of_keys)
        assert_rounded_once(out.reshape(exact.shape), exact, dtype, error)


@pytest.mark.fallback
def test_stand_in_of_a_suspended_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernel attends may change between two calls for the same shape."""
    shape = Case([0], group=64).shape
    monkeypatch.setattr("spark25_mlx.custom_kernels.decode_attention._bind", lambda *call: call)
    with simulated(), patch.object(Kernel, "ready", lambda self, *key: self.name not in suspended()):
        for _ in range(2):
            assert bind_decode_attention(shape, 2) == (shape, 2, True)
            with without("decode_attention_matrix"):
                assert bind_decode_attention(shape, 2) == (shape, 2, False)


@pytest.mark.fallback
def test_where_products_of_matrices_are_the_way() -> None:
    metal_sim.require_toolchain()
    with simulated():
        assert Case([0], group=64).shape.by_matrix
        assert not Case([0], group=64, matrix=False).shape.by_matrix
        assert Case([0], D=256, group=128).shape.by_matrix
        for other in ({"group": 32}, {"D": 96, "group": 96}, {"group": 64, "dtype": mx.float32}):
            assert not Case([0], **other).shape.by_matrix
        assert not test_decode_attention.Case([0], D=64, dtype=mx.bfloat16).shape.by_matrix


@pytest.mark.parametrize("group", [32, 64])
def test_zero_and_constant_rows(backend: Backend, group: int) -> None:
    """Groups without a range: scales have a least value, and nothing is divided by 0."""
    if backend.is_reference:
        pytest.skip("mx.quantize itself")
    case = Case([3], n_heads=1, group=group)
    keys, values = (make_rows(case, seed, 0.0) for seed in (2, 3))
    for value in (0.0, 1.5, -2.0):
        qkv = mx.full((1, 1, 3 * case.D), value, dtype=case.dtype)
        # The other rows are zeros, and the gate is half open.
        values = quantise(mx.full((*values[0].shape[:3], case.D), value, dtype=case.dtype), case)
        inputs = Inputs(qkv, mx.zeros((1, 1, 1), case.dtype), keys, values)
        out, after_keys, after = run(backend, case, inputs, 8)
        np.testing.assert_allclose(decoded(after, case)[0, 0, 3], value, atol=1e-6)
        np.testing.assert_allclose(to_float64(out), value / 2, atol=1e-6)
        unrotated = decoded(after_keys, case)[0, 0, 3, case.dims :]
        np.testing.assert_allclose(unrotated, value, rtol=2.0**-7)


@pytest.mark.parametrize("bits", [8, 4])
def test_as_accurate_as_mlx_lm(backend: Backend, bits: int) -> None:
    """Distance to float64 over the same stored rows, beside mlx-lm's attention on quantised caches."""
    if backend.name != SIMULATOR:
        pytest.skip("compares the kernel with MLX's CPU")
    case = Case([700], n_heads=4, D=128, capacity=701, bits=bits, group=64)
    qkv = random((1, 1, 6 * case.D), case.dtype, 0, 1.5)
    # An open gate: 1 to the last digit.
    scores = mx.full((1, 1, 4), 40.0, dtype=case.dtype)
    keys, values = (make_rows(case, seed, 0.0) for seed in (2, 3))
    out, keys, values = run(backend, case, Inputs(qkv, scores, keys, values), 8)
    q = rounded(test_qkv_rope.oracle(to_float64(qkv), [700], THETA, case.dims, 4, 1)[0], case.dtype)
    exact = attention(case, q, decoded(keys, case), decoded(values, case))
    with mx.stream(mx.cpu):
        theirs = quantized_scaled_dot_product_attention(
            mx.array(q.astype(np.float32)).astype(case.dtype),
            keys,
            values,
            scale=case.D**-0.5,
            mask=None,
            group_size=case.group,
            bits=bits,
        )
        mx.eval(theirs)
    ours = np.abs(to_float64(out).reshape(exact.shape) - exact)
    assert ours.max() <= np.abs(to_float64(theirs) - exact).max()


@dtypes
@pytest.mark.parametrize(("D", "bits", "group"), [(64, 8, 32), (256, 8, 64), (256, 4, 64)])
def test_with_metals_registers(
    backend: Backend, dtype: mx.Dtype, D: int, bits: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer simdgroups and keys at once than elsewhere."""
    monkeypatch.setattr("spark25_mlx.custom_kernels.decode_attention.backend_name", lambda: "metal")
    case = Case([9, 40], L=2, n_heads=4, D=D, bits=bits, group=group, dtype=dtype, matrix=False)
    check(backend, case)
    check(backend, replace(case, positions=[200], L=1, n_heads=8, n_kv_heads=4, capacity=201))


@pytest.mark.fallback
@pytest.mark.parametrize(("D", "bits", "group"), [(96, 8, 32), (160, 4, 32), (64, 8, 128), (64, 4, 48)])
def test_formats_that_do_not_fit_the_lanes(backend: Backend, D: int, bits: int, group: int) -> None:
    """A lane's share would be no whole word, or of two groups."""
    if backend.is_reference:
        pytest.skip("about the kernel")
    assert not can_decode(Case([0], D=D, bits=bits, group=group).shape)
