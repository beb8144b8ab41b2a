"""The race detector: what it must report and, as important, what it must not."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from . import Kind, MetalSimError, metal_kernel, options

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD = "simdgroup_barrier(mem_flags::mem_threadgroup);"
DEVICE = "threadgroup_barrier(mem_flags::mem_device);"
BOTH = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
IDS = """
    uint i = thread_position_in_grid.x;
    uint t = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint g = threadgroup_position_in_grid.x;
    threadgroup float s[64];
"""

CLEAN = {
    "own element without barrier": "s[t] = t; o[i] = s[t];",
    "neighbour behind a barrier": f"s[t] = t; {BARRIER} o[i] = s[63 - t];",
    "neighbour in the simdgroup behind a simdgroup barrier": f"s[t] = t; {SIMD} o[i] = s[t ^ 31];",
    "overwrite behind a barrier":
        f"s[t] = t; {BARRIER} float v = s[63 - t]; {BARRIER} s[t] = v; o[i] = s[t];",
    "overwrite in the simdgroup behind a simdgroup barrier":
        f"s[t] = t; {SIMD} float v = s[t ^ 1]; {SIMD} s[t] = v; o[i] = v;",
    "one writer, many readers": f"if (t == 0) s[0] = 5; {BARRIER} o[i] = s[0];",
    "many readers, then one writer":
        f"s[t] = t; {BARRIER} float v = s[7]; {BARRIER} if (t == 9) s[7] = v; o[i] = v;",
    "device memory behind a device barrier":
        f"o[i] = t; {DEVICE} float v = o[i ^ 63]; {DEVICE} o[i] = v;",
    "both memories behind one barrier":
        f"o[i] = t; s[t] = t; {BOTH} float v = o[i ^ 1] + s[63 - t]; {BOTH} o[i] = v;",
    "same value by all": "s[0] = 3; o[i] = 1;",
    "reads of an input by all threadgroups": "o[i] = a[0];",
    "atomic adds": f"""
        threadgroup atomic_uint n[1];
        if (t == 0) atomic_store_explicit(&n[0], 0u, memory_order_relaxed);
        {BARRIER}
        atomic_fetch_add_explicit(&n[0], 1u, memory_order_relaxed);
        {BARRIER}
        o[i] = atomic_load_explicit(&n[0], memory_order_relaxed);
    """,
    "loop with a barrier at both ends":
        f"float v = t; for (int k = 0; k < 3; k++) {{ s[t] = v; {BARRIER} v += s[63 - t]; {BARRIER} }}"
        "o[i] = v;",
}  # fmt: skip

RACES = {
    "read across simdgroups behind a simdgroup barrier": f"s[t] = t; {SIMD} o[i] = s[63 - t];",
    "loop without its second barrier":
        f"float v = t; for (int k = 0; k < 3; k++) {{ s[t] = v; {BARRIER} v += s[63 - t]; }} o[i] = v;",
    "overwrite of what another simdgroup has read":
        f"s[t] = t; {BARRIER} float v = s[63 - t]; {SIMD} s[t] = v; o[i] = v;",
    "overwrite of what all have read": f"s[t] = t; {BARRIER} float v = s[7]; if (t == 9) s[7] = v; o[i] = v;",
    "threadgroup barrier for device memory": f"o[i] = t; {BARRIER} float v = o[i ^ 63]; {BARRIER} o[i] = v;",
    "different values by all": "s[0] = t; o[i] = 1;",
    "read of another threadgroup's output": f"o[i] = t; {DEVICE} if (g == 1 && t == 0) o[i] = o[0];",
    "plain store beside atomic adds": f"""
        threadgroup atomic_uint n[1];
        if (t == 0) atomic_store_explicit(&n[0], 0u, memory_order_relaxed);
        {BARRIER}
        atomic_fetch_add_explicit(&n[0], 1u, memory_order_relaxed);
        ((threadgroup uint*)n)[0] = t;
        o[i] = 1;
    """,
    "SIMD operation orders no memory": "s[t] = t; float v = simd_sum(1.0f); o[i] = v + s[t ^ 1];",
}  # fmt: skip


def run(body: str) -> np.ndarray:
    kernel = metal_kernel("race", ["a"], ["o"], IDS + body)
    (out,) = kernel(
        inputs=[mx.ones((16,))],
        output_shapes=[(128,)],
        output_dtypes=[mx.float32],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
    )
    return np.array(out)


@pytest.mark.parametrize("name", CLEAN)
def test_no_false_alarm(name: str) -> None:
    results = []
    for order in ("forward", "reverse", "shuffle"):
        with options(order=order):
            results.append(run(CLEAN[name]))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffle"])
def test_race_is_found_in_every_order(name: str, order: str) -> None:
    with options(order=order), pytest.raises(MetalSimError) as caught:
        run(RACES[name])
    assert Kind.RACE in caught.value.kinds


def test_read_by_two_threadgroups_before_a_write() -> None:
    """The writer has read the element itself, which must not hide the other threadgroup's read."""
    kernel = metal_kernel(
        "race",
        ["a"],
        ["o"],
        "uint g = threadgroup_position_in_grid.x; float v = a[0];"
        "if (g == 1) ((device float*)a)[0] = 2; o[g] = v;",
    )
    with options(writable=("a",)), pytest.raises(MetalSimError, match="races with the read by thread"):
        kernel(
            inputs=[mx.ones((16,))],
            output_shapes=[(2,)],
            output_dtypes=[mx.float32],
            grid=(2, 1, 1),
            threadgroup=(1, 1, 1),
        )
