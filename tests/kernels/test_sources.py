"""The kernels' texts: what is left out of them, and that what is left is whole."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from spark25_mlx.custom_kernels.backend import _pieces, read_source, registered, select

HELPERS = sorted(
    {header for kernel in registered().values() for header in kernel.headers} | {"prelude/metal.cuh"}
)


@pytest.mark.parametrize("file", HELPERS)
def test_blank_lines_part_whole_functions(file: str) -> None:
    """So that helper files can be cut there, to leave out what a kernel does not call."""
    pieces = _pieces(file)
    assert pieces
    for piece in pieces:
        assert piece.count("{") == piece.count("}"), piece


@pytest.mark.parametrize(
    ("defines", "kept"),
    [(set(), "a c e"), ({"X"}, "a b e"), ({"Y"}, "a c d e"), ({"X", "Y"}, "a b e"), ({"Z"}, "a c e f")],
)
def test_branches(defines: set[str], kept: str) -> None:
    inner = "#ifdef Y\nd\n#endif\n"
    text = f"a\n#ifdef X\nb\n#else\nc\n{inner}#endif\ne\n#if defined(X)\n#elif defined(Z)\nf\n#endif\n"
    assert select(text, frozenset(defines)).split() == kept.split()


def test_no_condition_is_left() -> None:
    for kernel in registered().values():
        left = [line for line in kernel.source.splitlines() if line.startswith(("#if", "#el", "#end"))]
        assert not left, (kernel.name, left)


def test_includes_are_in_place() -> None:
    """Those of a kernel's parts, which have includes of their own."""
    for kernel in registered().values():
        assert "#include" not in kernel.source, kernel.name
    parts = [read_source(f"attention_{part}.metal") for part in ("begin", "rotate", "end")]
    body = read_source("decode_attention_matrix.metal")
    assert [body.count(part) for part in parts] == [1, 1, 1]
    assert [body.index(part) for part in parts] == sorted(body.index(part) for part in parts)


def test_prelude_stands_in_for_helpers() -> None:
    """What tensor cores do otherwise is in Metal's words for Metal, and in the prelude's for CUDA."""
    kernel = registered()["decode_attention_matrix"]
    on_metal, on_cuda = (kernel._header(kernel.source, mx.bfloat16, cuda=cuda) for cuda in (False, True))
    assert "simdgroup_multiply_accumulate" in on_metal and "asm" not in on_metal
    assert "simdgroup_multiply_accumulate" not in on_cuda and "asm" in on_cuda
    names = {"matrix_row", "matrix_column", "column_max", "column_sum", "right_operand", "multiply_add"}
    for header in (on_metal, on_cuda):
        assert sorted(names & set(found := re.findall(r"METAL_FUNC \w+ (\w+)\(", header))) == sorted(names)
        assert all(found.count(name) == 1 for name in names)
