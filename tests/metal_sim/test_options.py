"""Options, in-place writes, errors and the cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from . import Kind, MetalSimError, Options, compiler, current_options, metal_kernel, options, requirements
from . import strict as strict_module

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint8]


def launch(source: str, *inputs: mx.array, threads: int = 32, **changes: Any) -> mx.array:
    """One threadgroup that writes the float32 output o, one element a thread."""
    kernel = metal_kernel("probe", list("abcd"[: len(inputs)]), ["o"], source, changes.pop("header", ""))
    call: dict[str, Any] = {"output_shapes": [(threads,)], "output_dtypes": [mx.float32], **changes}
    call = {"grid": (threads, 1, 1), "threadgroup": (min(threads, 1024), 1, 1), **call}
    out: mx.array = kernel(inputs=list(inputs), **call)[0]
    return out


# -- in-place writes ----------------------------------------------------------------------------------

IN_PLACE = "uint i = thread_position_in_grid.x; ((device T*)a)[i + 1] = T(i); o[i] = float(a[i + 1]);"


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_land_in_the_callers_array(dtype: mx.Dtype) -> None:
    cache = mx.full((40,), 7, dtype=dtype)
    same_memory = cache
    with options(writable=("a",)):
        out = launch(IN_PLACE, cache, template=[("T", dtype)])
    np.testing.assert_array_equal(np.array(out), np.arange(32))
    expected = np.full(40, 7)
    expected[1:33] = np.arange(32)
    np.testing.assert_array_equal(np.array(same_memory.astype(mx.float32)), expected)


def test_write_into_a_reshaped_array_is_seen_by_both() -> None:
    cache = mx.zeros((2, 20))
    mx.eval(cache)
    with options(writable=("a",)):
        launch(IN_PLACE, cache.reshape(40), template=[("T", mx.float32)])
    assert cache[0, 19].item() == 18


def test_input_not_declared_writable_stays_as_it_was() -> None:
    cache = mx.zeros((40,))
    with options(writable=("b",)), pytest.raises(MetalSimError) as caught:
        launch(IN_PLACE, cache, template=[("T", mx.float32)])
    assert caught.value.kind == Kind.READ_ONLY
    assert caught.value.buffer == "a"
    assert mx.all(cache == 0).item()


def test_writable_input_must_not_be_copied() -> None:
    with options(writable=("a",)), pytest.raises(MetalSimError, match="not row-contiguous"):
        launch(IN_PLACE, mx.zeros((8, 5)).T, template=[("T", mx.float32)])


def test_writable_input_in_the_constant_space() -> None:
    with options(writable=("a",)), pytest.raises(MetalSimError) as caught:
        launch("((device float*)a)[0] = 1; o[thread_position_in_grid.x] = 1;", mx.zeros((4,)))
    assert caught.value.kind == Kind.ADDRESS_SPACE


def test_written_input_must_be_given_once() -> None:
    cache = mx.zeros((40,))
    source = IN_PLACE + "o[i] += float(b[i]);"
    with options(writable=("a",)), pytest.raises(MetalSimError, match="shares memory with 'b'"):
        launch(source, cache, cache, template=[("T", mx.float32)])


def test_race_through_a_writable_input() -> None:
    source = "uint i = thread_position_in_grid.x; ((device T*)a)[i] = T(i); o[i] = a[(i + 1) % 32];"
    with options(writable=("a",)), pytest.raises(MetalSimError) as caught:
        launch(source, mx.zeros((32,)), template=[("T", mx.float32)])
    assert caught.value.kind == Kind.RACE


# -- options -----------------------------------------------------------------------------------------

BLOCK_SUM = """
    threadgroup float partial[4];
    float sum = simd_sum(a[thread_position_in_grid.x]);
    if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[thread_position_in_grid.x] = partial[0] + partial[1] * 3.1f + partial[2] + partial[3];
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"order": "reverse"},
        {"order": "shuffle"},
        {"order": "shuffle", "seed": 9},
        {"sum_order": "butterfly-reversed"},
        {"sum_order": "ascending"},
        {"sum_order": "descending"},
        {"misaligned": True},
        {"round_grid": True},
        {"same_value_races": True},
        {"fma_contraction": True},
    ],
    ids=str,
)
def test_correct_kernel_passes_under_every_option(changes: dict[str, Any]) -> None:
    x = np.random.default_rng(3).standard_normal(128).astype(np.float32)
    with options(**changes):
        out = launch(BLOCK_SUM, mx.array(x), threads=128)
    sums = x.astype(np.float64).reshape(4, 32).sum(1)
    np.testing.assert_allclose(np.array(out), sums @ [1, 3.1, 1, 1], rtol=1e-5)


def test_sum_orders_differ() -> None:
    x = mx.array(np.random.default_rng(4).standard_normal(32).astype(np.float32))
    source = "o[thread_position_in_grid.x] = simd_sum(a[thread_position_in_grid.x]);"
    values = np.array(x).astype(np.float32)
    expected = {"ascending": values[0], "descending": values[31]}
    for k in range(1, 32):
        expected["ascending"] = np.float32(expected["ascending"] + values[k])
        expected["descending"] = np.float32(expected["descending"] + values[31 - k])
    tree = values
    while tree.size > 1:
        tree = tree[::2] + tree[1::2]
    halves = values
    while halves.size > 1:
        halves = halves[: halves.size // 2] + halves[halves.size // 2 :]
    expected |= {"butterfly": tree[0], "butterfly-reversed": halves[0]}
    for order, value in expected.items():
        with options(sum_order=order):
            assert launch(source, x)[5].item() == value, order
    assert len(set(expected.values())) > 1


def test_order_of_the_threads_shows() -> None:
    source = """
        threadgroup atomic_uint n[1];
        uint i = thread_position_in_grid.x;
        if (i == 0) atomic_store_explicit(&n[0], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = float(atomic_fetch_add_explicit(&n[0], 1u, memory_order_relaxed));
    """
    with options(order="forward"):
        forward = np.array(launch(source))
    with options(order="reverse"):
        reverse = np.array(launch(source))
    with options(order="shuffle"):
        shuffled = np.array(launch(source))
    np.testing.assert_array_equal(forward, np.arange(32))
    np.testing.assert_array_equal(reverse, np.arange(32)[::-1])
    np.testing.assert_array_equal(np.sort(shuffled), np.arange(32))
    assert not np.array_equal(shuffled, forward)


def test_fma_contraction_rounds_once() -> None:
    x = mx.array(np.full(32, 1 + 2**-12, np.float32))
    source = "uint i = thread_position_in_grid.x; o[i] = a[i] * a[i] - b[i];"
    product = mx.array(np.full(32, 1 + 2**-11, np.float32))
    assert launch(source, x, product)[0].item() == 0
    with options(fma_contraction=True):
        assert launch(source, x, product)[0].item() == 2**-24


@pytest.mark.no_toolchain
def test_options_nest_and_are_restored() -> None:
    with options(order="reverse", misaligned=True):
        with options(order="shuffle") as inner:
            assert inner == Options(order="shuffle", misaligned=True)
        assert current_options() == Options(order="reverse", misaligned=True)
    assert current_options() == Options()


@pytest.mark.no_toolchain
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "random"}, "order='random': must be one of"),
        ({"writable": "keys"}, "must be a tuple of names"),
        ({"timeout_s": 0}, "must be positive"),
        ({"speed": 1}, "no option 'speed'"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message), options(**changes):
        pass


# -- errors ------------------------------------------------------------------------------------------


def test_error_says_what_where_and_who() -> None:
    source = "uint i = thread_position_in_grid.x;\n\nfloat x = a[i + 4];\no[i] = x;"
    with pytest.raises(MetalSimError) as caught:
        launch(source, mx.zeros((64,)), threads=64, threadgroup=(64, 1, 1), header="// a header\n")
    error = caught.value
    assert error.kind == Kind.OUT_OF_BOUNDS
    assert error.buffer == "a"
    assert error.source_line == "float x = a[i + 4];"
    assert error.findings[0].place == "body line 3"
    assert error.thread is not None
    assert (error.thread.index, error.thread.lane, error.thread.simdgroup) == (60, 28, 1)
    assert error.thread.threadgroup == (0, 0, 0)
    assert "out-of-bounds at body line 3: read of 4 bytes at byte 256 of 'a'" in str(error)


def test_line_of_a_helper_in_the_header() -> None:
    header = "inline float helper(const device float* p) {\n    return p[1000];\n}\n"
    with pytest.raises(MetalSimError) as caught:
        launch("o[thread_position_in_grid.x] = helper(a);", mx.zeros((64,)), header=header)
    assert caught.value.findings[0].place == "header line 2"


def test_gap_between_strided_elements() -> None:
    kernel = metal_kernel("gap", ["a"], ["o"], "o[0] = a[1];", ensure_row_contiguous=False)
    with pytest.raises(MetalSimError) as caught:
        kernel(
            inputs=[mx.zeros((16, 4))[:, ::2]], output_shapes=[(1,)], output_dtypes=[mx.float32],
            grid=(1, 1, 1), threadgroup=(1, 1, 1),
        )  # fmt: skip
    assert caught.value.kind == Kind.STRIDE_GAP


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threadgroup": (2048, 1, 1)}, "more than 1024 threads"),
        ({"grid": (0, 1, 1)}, "grid=.*three positive sizes"),
        ({"grid": (32, 1)}, "grid=.*three positive sizes"),
    ],
)
def test_impossible_launch(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MetalSimError, match=message) as caught:
        launch("o[thread_position_in_grid.x] = 1;", **changes)
    assert caught.value.kind == Kind.LAUNCH


def test_too_many_buffers() -> None:
    names = [f"x{i}" for i in range(31)]
    kernel = metal_kernel("many", names, ["o"], "o[0] = 1;")
    with pytest.raises(MetalSimError, match="32 buffers"):
        kernel(
            inputs=[mx.array(1.0)] * 31, output_shapes=[(1,)], output_dtypes=[mx.float32],
            grid=(1, 1, 1), threadgroup=(1, 1, 1),
        )  # fmt: skip


def test_wrong_number_of_inputs() -> None:
    kernel = metal_kernel("two", ["a", "b"], ["o"], "o[0] = 1;")
    with pytest.raises(ValueError, match="inputs has 1 entries, must have 2"):
        kernel(
            inputs=[mx.zeros((9,))], output_shapes=[(1,)], output_dtypes=[mx.float32],
            grid=(1, 1, 1), threadgroup=(1, 1, 1),
        )  # fmt: skip


def test_endless_loop_ends_and_the_next_launch_works() -> None:
    with options(timeout_s=0.1), pytest.raises(MetalSimError) as caught:
        launch("uint i = thread_position_in_grid.x; while (a[0] < 1) { o[i] += 1; }", mx.zeros((9,)))
    assert Kind.TIMEOUT in caught.value.kinds
    assert launch("o[thread_position_in_grid.x] = 2;")[7].item() == 2


@pytest.mark.parametrize(
    ("source", "header", "kind"),
    [
        ("o[0] = even(9);", "bool odd(uint n);\nbool even(uint n) { return n == 0 || odd(n - 1); }\n"
         "bool odd(uint n) { return n != 0 && even(n - 1); }\n", Kind.RECURSION),
        ("o[0] = S().down(3);", "struct S { int down(int n) thread { return n ? down(n - 1) : 0; } };\n",
         Kind.RECURSION),
        ("o[0] = down<3>();", "template <int N> int down() { return 1 + down<N - 1>(); }\n"
         "template <> int down<0>() { return 0; }\n", None),
        ("o[0] = twice(twice(1.0f));", "inline float twice(float x) { return 2 * x; }\n", None),
        ("o[0] = *f(a);", "const float* f(const device float* p) { return p; }\n", Kind.ADDRESS_SPACE),
        ("o[0] = P{}.v == nullptr;", "struct P { float* v; };\n", Kind.ADDRESS_SPACE),
        ("float x; if (a[0] > 0) x = 1; o[0] = x;", "", Kind.UNINITIALISED),
        ("o[0] = 1 / 0;", "", Kind.UNDEFINED),
        ("o[0] = __builtin_sqrtf(a[0]);", "", Kind.DIALECT),
        ("o[0] = 1;", "#include <cmath>\n", Kind.DIALECT),
        ("threadgroup float t = 1; o[0] = t;", "", Kind.DIALECT),
        ("// double std:: goto\no[0] = 1; /* new */", "", None),
    ],
    ids=str,
)  # fmt: skip
def test_compile_only_pass(source: str, header: str, kind: Kind | None) -> None:
    kernel = metal_kernel("strict", ["a"], ["o"], source, header)
    generated = kernel.generated_source([mx.zeros((9,))], [mx.float32])
    if kind is None:
        strict_module.check(generated)
    else:
        with pytest.raises(MetalSimError) as caught:
            strict_module.check(generated)
        assert kind in caught.value.kinds


# -- cache and tool chain ----------------------------------------------------------------------------


def test_each_text_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"o[thread_position_in_grid.x] = {time.time_ns() % 10**6};"  # a text of this run's own
    started: list[str] = []
    run_clang = compiler.run_clang

    def counted(arguments: Any, text: str | None = None) -> Any:
        started.append("strict" if "-fsyntax-only" in arguments else "code")
        return run_clang(arguments, text)

    monkeypatch.setattr(compiler, "run_clang", counted)
    launch(source)
    launch(source)
    with options(order="reverse", sum_order="descending", misaligned=True):
        launch(source)
    assert started == ["strict", "code"]
    # A new process finds both in the directory.
    monkeypatch.setattr(compiler, "_libraries", {})
    monkeypatch.setattr(strict_module, "_checked", set())
    launch(source)
    assert started == ["strict", "code"]


@pytest.mark.no_toolchain
def test_cache_directory_is_configurable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("METAL_SIM_CACHE", str(tmp_path / "kernels"))
    assert compiler.cache_dir.__wrapped__() == tmp_path / "kernels"
    assert (tmp_path / "kernels").is_dir()


@pytest.mark.no_toolchain
@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_missing_compiler_skips_here_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(compiler, "CLANG", "clang-of-nowhere")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="needs clang-of-nowhere"):
        requirements.require_toolchain()
