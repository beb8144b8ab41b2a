"""The generated source is MLX's own, byte for byte.

Without Metal, MLX prints the source while it exports a function that calls the kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from . import metal_kernel
from .source import to_opencl

pytestmark = pytest.mark.no_toolchain

CASES: dict[str, tuple[dict[str, Any], list[mx.array], dict[str, Any]]] = {
    "template arguments of every kind": (
        {"input_names": ["x"], "source": "uint i = thread_position_in_grid.x;\n  o[i] = T(x[i]);"},
        [mx.zeros((16,))],
        {"template": [("T", mx.bfloat16), ("N", -3), ("FLAG", True), ("OFF", False)]},
    ),
    "constant and 0-d inputs": (
        {"input_names": ["few", "scalar", "many"], "source": "o[0] = few[0] * scalar + many[0];"},
        [mx.zeros((7,), mx.float16), mx.array(2.0), mx.zeros((8,), mx.bfloat16)],
        {},
    ),
    "shapes, strides and ndim": (
        {
            "input_names": ["x", "xx", "s"],
            "source": "o[0] = x_strides[0] + xx_shape[1] + x_ndim + s_ndim;",
        },
        [mx.zeros((4, 2, 3), mx.float16), mx.zeros((2, 3), mx.uint8), mx.array(1)],
        {"template": []},
    ),
    "thread attributes": (
        {
            "input_names": [],
            "header": "inline uint f(uint thread_index_in_quadgroup) { return thread_index_in_quadgroup; }\n",
            "source": "uint3 t = dispatch_threads_per_threadgroup + threads_per_threadgroup + grid_size;\n"
            "o[0] = t.x + simdgroups_per_threadgroup + thread_index_in_simdgroup + threadgroups_per_grid.y;",
        },
        [],
        {},
    ),
    "header without line end, template": (
        {"input_names": ["x"], "header": "// a\ninline int g() { return 1; }", "source": "o[0] = x[g()];"},
        [mx.zeros((9,), mx.int64)],
        {"template": [("T", mx.float32)]},
    ),
    "several outputs": (
        {"input_names": ["x"], "output_names": ["o", "p", "q"], "source": "o[0] = p[0] = q[0] = 1;"},
        [mx.zeros((9,), mx.bool_)],
        {"output_dtypes": [mx.float32, mx.int64, mx.bfloat16]},
    ),
    "atomic outputs": (
        {
            "input_names": ["x"],
            "atomic_outputs": True,
            "source": "atomic_fetch_add_explicit(o, x[0], memory_order_relaxed);",
        },
        [mx.zeros((9,), mx.uint64)],
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_mlx(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    definition, inputs, changes = CASES[case]
    definition = {"name": "probe", "output_names": ["o"], **definition}
    dtypes = changes.get("output_dtypes", [mx.float32])
    call = {
        "grid": (1, 1, 1),
        "threadgroup": (1, 1, 1),
        "output_dtypes": dtypes,
        "output_shapes": [(4,)] * len(dtypes),
        **changes,
    }
    kernel: Any = mx.fast.metal_kernel(**definition)

    def traced(*arrays: mx.array) -> Any:
        return kernel(inputs=list(arrays), verbose=True, **call)

    mx.export_function(str(tmp_path / "probe.mlxfn"), traced, *inputs)
    printed = capfd.readouterr().out
    source = metal_kernel(**definition).generated_source(inputs, dtypes, call.get("template"))
    assert f"Generated source code for `probe`:\n```\n{source.text}\n```\n" == printed


def test_places_are_those_of_the_author() -> None:
    kernel = metal_kernel("probe", ["x"], ["o"], source="first;\nsecond;", header="one\ntwo\n")
    source = kernel.generated_source([mx.zeros((9,))], [mx.float32], [("T", mx.float32)])
    lines = source.text.split("\n")
    assert source.place(lines.index("two") + 1) == "header line 2"
    assert source.place(lines.index("second;") + 1) == "body line 2"
    assert source.place(4).startswith("signature line")
    assert source.line_text(lines.index("second;") + 1) == "second;"


def test_rewriting_moves_no_line() -> None:
    kernel = metal_kernel(
        "probe",
        ["x"],
        ["o"],
        source="threadgroup float a[4],\n  b; // threadgroup float c;\n#if 1\n#endif\n"
        "threadgroup vec<float, 4> d[2];\nthreadgroup float* p = a;\nfloat4 v = float4(1,\n2, 3, 4);",
    )
    source = kernel.generated_source([mx.zeros((9,))], [mx.float32])
    rewritten = to_opencl(source.text)
    assert rewritten.count("\n") == source.text.count("\n")
    assert [name for name in "abcd" if f"threadgroup {name}__type&" in rewritten] == ["a", "b", "d"]
    assert "threadgroup float* p = a;" in rewritten
    assert "[[" not in rewritten
