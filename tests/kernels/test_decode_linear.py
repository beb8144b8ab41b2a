"""The decode step's linear layers, with what is fused into them, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.custom_kernels import decode_linear
from spark25_mlx.custom_kernels.decode_linear import (
    Weight,
    can_linear_add,
    can_norm_geglu,
    can_norm_qkv,
    linear_add,
    linear_add_reference,
    norm_geglu,
    norm_geglu_reference,
    norm_qkv,
    norm_qkv_reference,
)
from tests.kernels import test_geglu
from tests.kernels.backends import Backend
from tests.kernels.rounding import DTYPES, assert_rounded_once, random, to_float64

Linear = Callable[..., mx.array]
EPS = 1e-6
# (bits, group size): plain, and MLX's affine groups
FORMATS = [(16, 0), (8, 32), (8, 64), (8, 128), (4, 32), (4, 64), (4, 128)]

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
formats = pytest.mark.parametrize(
    ("bits", "group"), FORMATS, ids=[f"{bits}bit-{group}" if group else "plain" for bits, group in FORMATS]
)


@pytest.fixture(autouse=True)
def exact_matmuls(request: pytest.FixtureRequest) -> Iterator[None]:
    """The references multiply matrices, for which some GPUs use less than fp32."""
    of_reference = "backend" in request.fixturenames and request.getfixturevalue("backend").is_reference
    with mx.stream(mx.cpu) if of_reference else nullcontext():
        yield


def random_weight(rows: int, columns: int, dtype: mx.Dtype, bits: int, group: int, seed: int) -> Weight:
    plain = random((rows, columns), dtype, seed, columns**-0.5)
    if bits == 16:
        return Weight(plain)
    with mx.stream(mx.cpu):
        packed = mx.quantize(plain, group_size=group, bits=bits)
        mx.eval(packed)
    return Weight(*packed, bits=bits, group_size=group)


def matrix(weight: Weight) -> tuple[np.ndarray, np.ndarray]:
    """The matrix that the weight stands for, element by element from its codes, and the magnitudes of the
    terms of which its elements are sums: scale * code + bias."""
    if weight.scales is None or weight.biases is None:
        plain = to_float64(weight.weight)
        return plain, np.abs(plain)
    shifts = np.arange(0, 32, weight.bits, dtype=np.uint32)
    words = np.array(weight.weight)
    codes = ((words[..., None] >> shifts) & np.uint32((1 << weight.bits) - 1)).reshape(words.shape[0], -1)
    scales, biases = (
        np.repeat(to_float64(x), weight.group_size, axis=1) for x in (weight.scales, weight.biases)
    )
    return scales * codes + biases, np.abs(scales * codes) + np.abs(biases)


def product(weight: Weight, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """W x, and an error that sums of fp32 products stay below."""
    elements, magnitudes = matrix(weight)
    return elements @ x, 5e-7 * (magnitudes @ np.abs(x))


def norm(residual: mx.array, norm_weight: mx.array) -> np.ndarray:
    x = to_float64(residual).flatten()
    return np.asarray(to_float64(norm_weight) * x / np.sqrt(np.square(x).mean() + EPS))


def assert_qkv(
    run: Callable[..., tuple[mx.array, mx.array]], weight: Weight, gate_weight: mx.array, scale: float = 3.0
) -> None:
    residual = random((1, 1, weight.columns), mx.float32, 10, scale)
    norm_weight = random((weight.columns,), gate_weight.dtype, 11) + mx.array(1.0, gate_weight.dtype)
    x = norm(residual, norm_weight)
    actual = run(residual, norm_weight, weight, gate_weight, eps=EPS)
    for out, matrices in zip(actual, (weight, Weight(gate_weight)), strict=True):
        exact, error = product(matrices, x)
        assert_rounded_once(out, exact[None, None], gate_weight.dtype, error)


def assert_geglu(run: Linear, gate: Weight, up: Weight, dtype: mx.Dtype) -> None:
    residual = random((1, 1, gate.columns), mx.float32, 10, 3.0)
    norm_weight = random((gate.columns,), dtype, 11) + mx.array(1.0, dtype)
    x = norm(residual, norm_weight)
    (z, z_error), (u, u_error) = product(gate, x), product(up, x)
    exact = test_geglu.oracle(z, u)
    gelu = test_geglu.oracle(z, np.ones_like(z))
    # GELU's derivative is below 1.13.
    error = 1.13 * np.abs(u) * z_error + np.abs(gelu) * u_error + test_geglu.fp32_error(z, u)
    actual = run(residual, norm_weight, gate, up, eps=EPS)
    assert_rounded_once(actual, exact[None, None], dtype, error)


def assert_added(run: Linear, weight: Weight, dtype: mx.Dtype) -> None:
    residual = random((1, 1, weight.rows), mx.float32, 10, 3.0)
    x = random((1, 1, weight.columns), dtype, 11)
    exact, error = product(weight, to_float64(x).flatten())
    wide = to_float64(residual)
    assert_rounded_once(run(residual, x, weight), wide + exact, mx.float32, error + 1e-7 * np.abs(wide))


def widths(group: int, most: int) -> list[int]:
    """Columns, few of them a multiple of what the simdgroups take at once, all whole groups; the widest
    need several rounds of loads."""
    return [k for k in (192, 640, 2048 + 64, 2688, 5248, 10368) if k % max(group, 64) == 0 and k <= most]


@dtypes
@formats
def test_norm_qkv(backend: Backend, dtype: mx.Dtype, bits: int, group: int) -> None:
    run = backend.pick(norm_qkv, norm_qkv_reference)
    for columns, rows, heads in zip(widths(group, 2688), (70, 33, 1, 9), (5, 1, 16, 9), strict=False):
        gate_weight = random((heads, columns), dtype, 1, columns**-0.5)
        assert_qkv(run, random_weight(rows, columns, dtype, bits, group, 2), gate_weight)


@dtypes
@formats
def test_norm_geglu(backend: Backend, dtype: mx.Dtype, bits: int, group: int) -> None:
    run = backend.pick(norm_geglu, norm_geglu_reference)
    for columns, rows in zip(widths(group, 2688), (35, 8, 1, 9), strict=False):
        gate, up = (random_weight(rows, columns, dtype, bits, group, seed) for seed in (1, 2))
        assert_geglu(run, gate, up, dtype)


@dtypes
@formats
def test_linear_add(backend: Backend, dtype: mx.Dtype, bits: int, group: int) -> None:
    run = backend.pick(linear_add, linear_add_reference)
    for columns, rows in zip(widths(group, 10368), (70, 33, 1, 2, 3, 5), strict=False):
        assert_added(run, random_weight(rows, columns, dtype, bits, group, 1), dtype)


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize(("bits", "group"), [(16, 0), (8, 64), (4, 32)])
def test_groups_of_rows_in_turns(
    backend: Backend, bits: int, group: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few threadgroups for many rows, the gates' among them; the last turn is not for all."""
    monkeypatch.setattr(decode_linear, "_MOST_NORMS", {"metal": most, "cuda": most})
    weight, other = (random_weight(90, 640, mx.bfloat16, bits, group, seed) for seed in (1, 2))
    gate_weight = random((20, 640), mx.bfloat16, 3, 640**-0.5)
    assert_qkv(backend.pick(norm_qkv, norm_qkv_reference), weight, gate_weight)
    assert_geglu(backend.pick(norm_geglu, norm_geglu_reference), weight, other, mx.bfloat16)


@dtypes
@pytest.mark.parametrize("columns", [32, 96, 1056])
def test_narrow_plain_matrices(backend: Backend, dtype: mx.Dtype, columns: int) -> None:
    """Fewer columns than the lanes of a simdgroup take at once."""
    weight = random_weight(5, columns, dtype, 16, 0, 1)
    gate_weight = random((3, columns), dtype, 2, columns**-0.5)
    assert_qkv(backend.pick(norm_qkv, norm_qkv_reference), weight, gate_weight)
    assert_added(backend.pick(linear_add, linear_add_reference), weight, dtype)


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 1e4])
def test_epsilon_and_scales(backend: Backend, scale: float) -> None:
    """Where epsilon matters (small activations) and where it does not."""
    weight = random_weight(9, 192, mx.float32, 16, 0, 1)
    gate_weight = random((3, 192), mx.float32, 2, 192**-0.5)
    assert_qkv(backend.pick(norm_qkv, norm_qkv_reference), weight, gate_weight, scale)


def test_gates_open_and_shut(backend: Backend) -> None:
    """GELU of large gates in either direction is the gate and 0, whatever the weights' sign."""
    residual, norm_weight = mx.ones((1, 1, 192)), mx.ones(192)
    rows = mx.array([[1.0], [-1.0], [0.0]]) * mx.ones((1, 192))
    run = backend.pick(norm_geglu, norm_geglu_reference)
    out = run(residual, norm_weight, Weight(rows), Weight(mx.abs(rows)), eps=0.0)
    np.testing.assert_allclose(np.array(out)[0, 0], [192.0**2, 0.0, 0.0], rtol=1e-6)


@pytest.mark.fallback
@formats
def test_which_formats_have_kernels(backend: Backend, bits: int, group: int) -> None:
    runs = not backend.is_reference
    gates = mx.zeros((4, 640))
    for dtype in DTYPES.values():
        weight = random_weight(4, 640, dtype, bits, group, 1)
        assert can_norm_qkv(dtype, weight, gates) == runs
        assert can_norm_geglu(dtype, weight, weight) == runs
        assert can_linear_add(dtype, weight) == runs
    plain, odd, wide = (Weight(mx.zeros((4, columns))) for columns in (640, 640 + 4, 8192))
    assert not can_linear_add(mx.float32, odd)
    assert not can_norm_qkv(mx.float32, odd, gates) and not can_norm_geglu(mx.float32, odd, odd)
    assert not can_norm_qkv(mx.float32, wide, gates) and not can_norm_geglu(mx.float32, wide, wide)
    assert can_linear_add(mx.float32, wide) == runs
    quantised = random_weight(4, 640, mx.float32, 8, 64, 1)
    assert not can_norm_geglu(mx.float32, plain, quantised)


def test_widest_norm(backend: Backend) -> None:
    """All of the threadgroup memory that there is."""
    gate_weight = random((1, 7680), mx.bfloat16, 2, 7680**-0.5)
    weight = random_weight(2, 7680, mx.bfloat16, 4, 64, 1)
    assert backend.is_reference or can_norm_qkv(mx.bfloat16, weight, gate_weight)
    assert_qkv(backend.pick(norm_qkv, norm_qkv_reference), weight, gate_weight)


def test_oracle_of_packed_codes() -> None:
    """Against MLX's own unpacking, of which one rounding to fp32 is allowed."""
    for bits, group in FORMATS[1:]:
        weight = random_weight(3, 640, mx.float32, bits, group, 1)
        assert weight.scales is not None
        with mx.stream(mx.cpu):
            unpacked = mx.dequantize(weight.weight, weight.scales, weight.biases, group_size=group, bits=bits)
            mx.eval(unpacked)
        elements, magnitudes = matrix(weight)
        assert (np.abs(elements - to_float64(unpacked)) <= 2.0**-23 * magnitudes).all()
        assert math.isclose(np.abs(elements).mean(), 640**-0.5 * math.sqrt(2 / math.pi), rel_tol=0.05)
