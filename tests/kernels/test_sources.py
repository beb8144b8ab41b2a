"""The kernels' texts: what is left out of them, and that what is left is whole."""

from __future__ import annotations

import pytest

from spark25_mlx.custom_kernels.backend import _pieces, registered, select

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
