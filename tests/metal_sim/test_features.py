"""The Metal that kernels may use gives the values it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from . import metal_kernel, options
from .source import THREAD_ATTRIBUTES

Array = npt.NDArray[Any]

LANE = "uint i = thread_position_in_grid.x;\n"
X = np.random.default_rng(1).standard_normal(128).astype(np.float32)
CODES = np.random.default_rng(2).integers(0, 2**32, 128, dtype=np.uint32)


def run(
    source: str,
    *inputs: Array | mx.array,
    size: int = 32,
    dtype: mx.Dtype = mx.float32,
    threads: int = 32,
    threadgroup: int = 32,
    header: str = "",
    template: list[tuple[str, Any]] | None = None,
    init_value: float | None = None,
    atomic: bool = False,
) -> Array:
    """Run a kernel with inputs a, b, ... and the output o, one-dimensional."""
    arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
    kernel = metal_kernel(
        "feature", list("abcd"[: len(arrays)]), ["o"], source, header, atomic_outputs=atomic
    )
    (out,) = kernel(
        inputs=arrays,
        output_shapes=[(size,)],
        output_dtypes=[dtype],
        grid=(threads, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        template=template,
        init_value=init_value,
    )
    assert out.dtype == dtype and out.shape == (size,)
    return np.array(out.astype(mx.float32) if dtype == mx.bfloat16 else out)


def test_vector_types() -> None:
    out = run(
        LANE + "float4 v = *(const device float4*)(a + 4 * i);\n"
        "float4 w = float4(half4(v)) + float4(v.wzyx) * 2.0f - float4(1, v.xy, 0.5h);\n"
        "w.xy = w.yx;\n"
        "float2 u = float2(w[0], w.w) + vec<float, 2>(1.0f);\n"
        "o[i] = dot(w, float4(1)) + length(v.xyz) + u.x + u.y;",
        X,
    )
    v = X.reshape(32, 4).astype(np.float64)
    w = v.astype(np.float16) + v[:, ::-1] * 2 - np.stack([np.ones(32), v[:, 0], v[:, 1], np.full(32, 0.5)], 1)
    w[:, :2] = w[:, 1::-1]
    expected = w.sum(1) + np.linalg.norm(v[:, :3], axis=1) + w[:, 0] + w[:, 3] + 2
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_vector_codes_are_dequantised() -> None:
    out = run(
        LANE + "uint4 words = *(const device uint4*)(a + 4 * i);\n"
        "uint4 low = words & 0xF, high = (words >> 28) ^ uint4(1);\n"
        "uchar4 bytes = as_type<uchar4>(words.x);\n"
        "float4 f = static_cast<float4>(low) - float4(high);\n"
        "o[i] = f.x + 2 * f.y + 3 * f.z + 4 * f.w + float(int(bytes.w) - 128);",
        CODES,
    )
    words = CODES.reshape(32, 4)
    f = (words & 0xF).astype(np.float64) - ((words >> 28) ^ 1)
    np.testing.assert_array_equal(out, f @ [1, 2, 3, 4] + (words[:, 0] >> 24) - 128.0)


def test_64_bit_integers() -> None:
    out = run(
        LANE + "ulong wide = ulong(a[i]) * 0x9E3779B97F4A7C15ul;\n"
        "uint64_t turned = (wide << 7) ^ (wide >> 57);\n"
        "int64_t signed_part = as_type<long>(turned) / 3;\n"
        "o[i] = as_type<ulong>(signed_part) + mulhi(wide, turned) + ulong(mulhi(a[i], a[i + 1]));",
        CODES,
        dtype=mx.uint64,
    )
    mask = 2**64 - 1
    for i, code in enumerate(CODES[:32].tolist()):
        wide = code * 0x9E3779B97F4A7C15 & mask
        turned = (wide << 7 & mask) ^ wide >> 57
        third = int(np.trunc(np.array(turned, np.uint64).view(np.int64).item() / 3))
        signed = turned - 2**64 if turned >> 63 else turned
        third = abs(signed) // 3 * (1 if signed >= 0 else -1)
        expected = (third & mask) + (wide * turned >> 64) + (code * int(CODES[i + 1]) >> 32)
        assert int(out[i]) == expected & mask


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "sin(x)": np.sin,
    "cos(x)": np.cos,
    "tan(x)": np.tan,
    "tanh(x)": np.tanh,
    "atan(x)": np.arctan,
    "exp(x)": np.exp,
    "exp2(x)": np.exp2,
    "floor(x)": np.floor,
    "ceil(x)": np.ceil,
    "rint(x)": np.rint,
    "log(1.0f + fabs(x))": lambda x: np.log(np.float32(1) + np.abs(x, dtype=np.float32)),
    "log2(fabs(x))": lambda x: np.log2(np.abs(x)),
    "sqrt(fabs(x))": lambda x: np.sqrt(np.abs(x)),
    "rsqrt(fabs(x))": lambda x: 1 / np.sqrt(np.abs(x)),
    "pow(fabs(x), 1.5f)": lambda x: np.abs(x) ** 1.5,
    "fma(x, x, -1.0f)": lambda x: x * x - 1,
    "fmax(x, 0.25f)": lambda x: np.maximum(x, 0.25),
    "fmod(x, 0.25f)": lambda x: np.fmod(x, 0.25),
}


@pytest.mark.parametrize("namespace", ["metal", "metal::precise", "metal::fast"])
def test_mathematical_functions(namespace: str) -> None:
    lines = [f"o[{k * 32} + i] = {namespace}::{call};\n" for k, call in enumerate(FUNCTIONS)]
    out = run(LANE + "float x = a[i];\n" + "".join(lines), X, size=32 * len(FUNCTIONS))
    for values, (call, reference) in zip(out.reshape(-1, 32), FUNCTIONS.items(), strict=True):
        np.testing.assert_allclose(values, reference(X[:32].astype(np.float64)), rtol=5e-7, err_msg=call)


def test_functions_without_variants() -> None:
    out = run(
        LANE + "float x = a[i];\n"
        "o[i] = clamp(x, -0.5f, 0.5f) + min(x, 0.1f) + max(int(i), 7) + select(1.0f, 2.0f, x > 0)\n"
        "  + abs(x) + sign(x) + copysign(3.0f, x) + popcount(i) + clz(i + 1) + extract_bits(i, 1, 2)\n"
        "  + (isnan(x) || isinf(x) ? 100 : 0) + mix(0.0f, 4.0f, 0.25f)\n"
        "  + select(float4(1), float4(2), float4(x) > 0).y;",
        X,
    )
    x, i = X[:32].astype(np.float64), np.arange(32)
    expected = x.clip(-0.5, 0.5) + np.minimum(x, 0.1) + np.maximum(i, 7) + 2 * np.where(x > 0, 2, 1)
    expected += np.abs(x) + np.sign(x) + np.copysign(3, x) + np.bitwise_count(i) + 1
    expected += [32 - int(k + 1).bit_length() for k in i] + (i >> 1 & 3)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_simd_functions() -> None:
    out = run(
        "uint t = thread_index_in_simdgroup; float x = a[t];\n"
        "float s = simd_sum(x) + 2 * simd_max(x) + 3 * simd_min(x);\n"
        "float p = simd_shuffle_xor(x, 5) + simd_shuffle(x, 31 - t);\n"
        "p += simd_broadcast(x, 3) + simd_broadcast_first(x);\n"
        "float next = simd_shuffle_down(x, 1); p += t < 31 ? next : 0;\n"
        "p += simd_prefix_inclusive_sum(x) - simd_prefix_exclusive_sum(x);\n"
        "uint votes = popcount(uint(ulong(simd_ballot(x > 0))));\n"
        "votes += uint(simd_any(t == 9)) + uint(simd_all(t < 9));\n"
        "half4 h = simd_sum(half4(half(t)));\n"
        "o[t] = s + p + float(votes) + float(h.w) + float(simd_or(1u << t) == 0xffffffffu);",
        X[:32],
    )
    x, t = X[:32].astype(np.float64), np.arange(32)
    expected = x.sum() + 2 * x.max() + 3 * x.min() + x[t ^ 5] + x[::-1] + x[3] + x[0]
    expected += np.append(x[1:], 0) + x + (x > 0).sum() + 1 + t.sum() + 1
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_products_of_matrices() -> None:
    """8 x 8, each lane two neighbours of a row: halves times halves, added to floats."""
    row, column = "(t / 16 * 4 + t / 2 % 4)", "(t / 8 % 2 * 4 + t % 2 * 2)"
    out = run(
        "uint t = thread_index_in_simdgroup;\n"
        f"uint at = 8 * {row} + {column};\n"
        "simdgroup_matrix<half, 8, 8> left, right;\n"
        "simdgroup_matrix<float, 8, 8> sum;\n"
        "reinterpret_cast<thread half2&>(left.thread_elements()) = half2(half(a[at]), half(a[at + 1]));\n"
        "reinterpret_cast<thread half2&>(right.thread_elements()) = half2(half(b[at]), half(b[at + 1]));\n"
        "reinterpret_cast<thread float2&>(sum.thread_elements()) = float2(float(at), float(at + 1));\n"
        "simdgroup_multiply_accumulate(sum, left, right, sum);\n"
        "const float2 both = reinterpret_cast<thread float2&>(sum.thread_elements());\n"
        "o[at] = both.x; o[at + 1] = both.y;",
        X,
        X[::-1].copy(),
        size=64,
    )
    left, right = (x[:64].astype(np.float16).astype(np.float64).reshape(8, 8) for x in (X, X[::-1]))
    np.testing.assert_allclose(out.reshape(8, 8), left @ right + np.arange(64).reshape(8, 8), rtol=1e-6)


def test_partial_simdgroup_and_uneven_threadgroups() -> None:
    out = run(
        "uint i = thread_position_in_grid.x;\n"
        "o[i] = simd_sum(1.0f) + 100 * threads_per_threadgroup.x + 10000 * simdgroups_per_threadgroup\n"
        "  + 100000 * threadgroup_position_in_grid.x;",
        size=100,
        threads=100,
        threadgroup=64,
    )
    first, second = out[:64], out[64:]
    np.testing.assert_array_equal(first, 32 + 6400 + 20000)
    np.testing.assert_array_equal(second[:32], 32 + 3600 + 20000 + 100000)
    np.testing.assert_array_equal(second[32:], 4 + 3600 + 20000 + 100000)


def test_three_dimensional_ids() -> None:
    kernel = metal_kernel(
        "ids",
        [],
        ["o"],
        "uint3 p = thread_position_in_grid, n = threads_per_grid;\n"
        "uint3 q = threadgroup_position_in_grid * dispatch_threads_per_threadgroup;\n"
        "q += thread_position_in_threadgroup;\n"
        "o[(p.z * n.y + p.y) * n.x + p.x] = q.x + 10 * q.y + 100 * q.z + 1000 * thread_index_in_threadgroup;",
    )
    (out,) = kernel(
        inputs=[], output_shapes=[(4, 6, 8)], output_dtypes=[mx.uint32], grid=(8, 6, 4), threadgroup=(4, 3, 2)
    )
    z, y, x = np.indices((4, 6, 8))
    expected = x + 10 * y + 100 * z + 1000 * (x % 4 + 4 * (y % 3) + 12 * (z % 2))
    np.testing.assert_array_equal(np.array(out), expected)


def test_every_thread_attribute() -> None:
    """Seen by the last thread of a grid of 10 x 7 x 3 in threadgroups of 8 x 4 x 2: its own is 2 x 3 x 1."""
    expected = {
        "dispatch_quadgroups_per_threadgroup": 16,
        "dispatch_simdgroups_per_threadgroup": 2,
        "dispatch_threads_per_threadgroup": (8, 4, 2),
        "grid_origin": (0, 0, 0),
        "grid_size": (10, 7, 3),
        "quadgroup_index_in_threadgroup": 1,
        "quadgroups_per_threadgroup": 2,
        "simdgroup_index_in_threadgroup": 0,
        "simdgroups_per_threadgroup": 1,
        "thread_execution_width": 32,
        "thread_index_in_quadgroup": 1,
        "thread_index_in_simdgroup": 5,
        "thread_index_in_threadgroup": 5,
        "thread_position_in_grid": (9, 6, 2),
        "thread_position_in_threadgroup": (1, 2, 0),
        "threadgroup_position_in_grid": (1, 1, 1),
        "threadgroups_per_grid": (2, 2, 2),
        "threads_per_grid": (10, 7, 3),
        "threads_per_simdgroup": 32,
        "threads_per_threadgroup": (2, 3, 1),
    }
    assert list(expected) == [name for name, _ in THREAD_ATTRIBUTES]
    words = [
        f"{name}.{axis}" if isinstance(value, tuple) else name
        for name, value in expected.items()
        for axis in ("xyz" if isinstance(value, tuple) else "x")
    ]
    lines = [f"o[{k}] = {word};\n" for k, word in enumerate(words)]
    last = "uint3 p = thread_position_in_grid;\nif (p.x == 9 && p.y == 6 && p.z == 2)"
    kernel = metal_kernel("attributes", [], ["o"], f"{last} {{\n{''.join(lines)}}}")
    (out,) = kernel(
        inputs=[],
        output_shapes=[(len(words),)],
        output_dtypes=[mx.uint32],
        grid=(10, 7, 3),
        threadgroup=(8, 4, 2),
    )
    flat = [v for value in expected.values() for v in (value if isinstance(value, tuple) else (value,))]
    assert dict(zip(words, np.array(out).tolist(), strict=True)) == dict(zip(words, flat, strict=True))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_narrow_floats_round_every_operation(dtype: mx.Dtype) -> None:
    a, b = (mx.array(v).astype(dtype) for v in (X[:32], X[32:64]))
    out = run(LANE + "o[i] = a[i] * b[i] + a[i];", a, b, dtype=dtype)
    np.testing.assert_array_equal(out, np.array((a * b + a).astype(mx.float32)))


def test_float_rounds_to_nearest_even_bfloat() -> None:
    bits = np.concatenate([CODES, np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800001], np.uint32)])
    values = mx.array(bits).view(mx.float32)
    out = run(LANE + "o[i] = bfloat16_t(a[i]);", values, size=132, threads=132, dtype=mx.bfloat16)
    np.testing.assert_array_equal(out, np.array(values.astype(mx.bfloat16).astype(mx.float32)))


def test_atomic_histogram() -> None:
    digits = (CODES % 5).astype(np.int32)
    out = run(
        LANE + "uint t = thread_position_in_threadgroup.x;\n"
        "threadgroup atomic_uint bins[5];\n"
        "if (t < 5) atomic_store_explicit(&bins[t], 0u, memory_order_relaxed);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "atomic_fetch_add_explicit(&bins[a[i]], 1u, memory_order_relaxed);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "uint count = t < 5 ? atomic_load_explicit(&bins[t], memory_order_relaxed) : 0;\n"
        "if (t < 5) atomic_fetch_add_explicit(&o[t], count, memory_order_relaxed);",
        digits,
        size=5,
        dtype=mx.uint32,
        threads=128,
        threadgroup=64,
        init_value=0,
        atomic=True,
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.bincount(digits, minlength=5))


def test_headers_of_mlx() -> None:
    out = run(
        LANE + "o[i] = a[elem_to_loc(i, a_shape, a_strides, a_ndim)] + ceildiv(5, 2) + WorkPerThread<T>::n;",
        mx.array(X[:32].reshape(4, 8)),
        template=[("T", mx.bfloat16)],
    )
    np.testing.assert_allclose(out, X[:32] + 3 + 4, rtol=1e-6)


def test_tables_and_overloads_by_address_space() -> None:
    out = run(
        LANE + "threadgroup float t[1];\nif (i == 0) t[0] = 8;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "float p[1] = {4}; o[i] = TABLE[i % 4] + first(a) + first(b) + first(t) + first(p);",
        X,
        X[:1],
        header="constant float TABLE[4] = {10, 20, 30, 40};\n"
        "inline float first(const device float* x) { return x[0]; }\n"
        "inline float first(const constant float* x) { return x[0]; }\n"
        "inline float first(const threadgroup float* x) { return x[0]; }\n"
        "inline float first(const thread float* x) { return x[0]; }\n",
    )
    np.testing.assert_allclose(out, np.tile([10, 20, 30, 40], 8) + 2 * X[0] + 12, rtol=1e-6)


def test_transposed_input_keeps_its_strides() -> None:
    matrix = mx.array(X.reshape(8, 16)).T
    source = LANE + "o[i] = a[(i / 8) * a_strides[0] + (i % 8) * a_strides[1]];"
    results = []
    for contiguous in (False, True):
        kernel = metal_kernel("strided", ["a"], ["o"], source, ensure_row_contiguous=contiguous)
        (out,) = kernel(
            inputs=[matrix], output_shapes=[(16, 8)], output_dtypes=[mx.float32], grid=(128, 1, 1),
            threadgroup=(32, 1, 1),
        )  # fmt: skip
        results.append(np.array(out))
    np.testing.assert_array_equal(results[0], X.reshape(8, 16).T)
    np.testing.assert_array_equal(results[1], X.reshape(8, 16).T)


def test_init_value_and_partial_outputs() -> None:
    source = LANE + "if (i < 20) o[i] = T(i);"
    out = run(source, dtype=mx.bfloat16, init_value=-1.5, template=[("T", mx.bfloat16)])
    np.testing.assert_array_equal(out, np.where(np.arange(32) < 20, np.arange(32), -1.5))
    with options(partial_outputs=("o",)):
        out = run(source, template=[("T", mx.float32)])
    np.testing.assert_array_equal(out[:20], np.arange(20))


def test_verbose_prints_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = metal_kernel("printed", [], ["o"], "o[0] = 1;")
    call: dict[str, Any] = {"inputs": [], "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    kernel(**call, grid=(1, 1, 1), threadgroup=(1, 1, 1), verbose=True)
    assert capsys.readouterr().out.startswith("Generated source code for `printed`:\n```\n[[kernel]] void ")
