"""Bugs planted into correct kernels, and what must catch each.

A `Subject` builds a kernel through the factory it is given, launches it and asserts its results. A
`Planted` row names a subject, a text to replace in its body or header, and the kind of finding expected.
To plant bugs in a real kernel, add a subject whose `run` hands the factory to that kernel.

`python -m tests.metal_sim.planted` runs all rows, and those of the project's kernels, and prints what caught
each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from . import Kind, MetalSimError, metal_kernel, options

KernelFactory = Callable[..., Any]
"""Called with the arguments of mx.fast.metal_kernel."""

WRONG_VALUES = "wrong values"
NOTHING = "nothing"
"""Expected of a change that is no bug: the subject must still pass."""


@dataclass(frozen=True)
class Subject:
    """A kernel with a launch that a correct implementation passes."""

    name: str
    run: Callable[[KernelFactory], None]


@dataclass(frozen=True)
class Planted:
    """One bug: replace `find` by `replace` in the subject's body and header."""

    subject: str
    bug: str
    find: str
    replace: str
    expected: Kind | str
    options: Mapping[str, Any] = field(default_factory=dict)


class Planting:
    """A kernel factory that replaces `find` in the body and header of every kernel that has it."""

    def __init__(self, find: str, replace: str) -> None:
        self.find = find
        self.replace = replace
        self.planted = False

    def __call__(self, *, source: str, header: str = "", **arguments: Any) -> Any:
        self.planted |= self.find in source or self.find in header
        return metal_kernel(
            source=source.replace(self.find, self.replace),
            header=header.replace(self.find, self.replace),
            **arguments,
        )


def assert_caught(subject: Subject, row: Planted) -> None:
    """What the row expects is among what was found."""
    found, description = catch(subject, row)
    print(f"{row.subject}: {row.bug} -> {description}")
    assert row.expected in found, description


def catch(subject: Subject, planted: Planted) -> tuple[frozenset[Kind | str], str]:
    """Run a subject with its bug: the kinds of what was found, and a description.

    Raises ValueError if no kernel of the subject has the text to replace.
    """
    factory = Planting(planted.find, planted.replace)
    kinds: frozenset[Kind | str] = frozenset({NOTHING})
    description = NOTHING
    try:
        with options(**planted.options):
            subject.run(factory)
    except MetalSimError as error:
        first = error.findings[0]
        kinds = error.kinds
        description = f"{first.kind} at {first.place or 'launch'}: {first.message}"
    except AssertionError:
        kinds, description = frozenset({WRONG_VALUES}), WRONG_VALUES
    if not factory.planted:
        raise ValueError(f"'{planted.bug}': no kernel of '{subject.name}' contains {planted.find!r}")
    return kinds, description


# ---------------------------------------------------------------------------------------------------
# Subjects of our own

_random = np.random.default_rng(20)


def _values(*shape: int) -> npt.NDArray[np.float32]:
    return _random.standard_normal(shape).astype(np.float32)


def _array(values: npt.NDArray[Any]) -> mx.array:
    return mx.array(values)


# Root-mean-square norm of rows, one threadgroup of TG threads a row.
_ROWS, _WIDTH, _THREADS = 3, 200, 96
_NORM_X, _NORM_WEIGHT = _values(_ROWS, _WIDTH), _values(_WIDTH)
_NORM_HEADER = """
template <int TG>
inline float threadgroup_sum(float value, threadgroup float* partial, uint lane, uint simdgroup) {
    value = simd_sum(value);
    if (lane == 0) {
        partial[simdgroup] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (int i = 0; i < TG / 32; i++) {
        total += partial[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return total;
}
"""
_NORM_SOURCE = """
    constexpr int PER_THREAD = (D + TG - 1) / TG;
    threadgroup float partial[TG / 32];
    uint row = threadgroup_position_in_grid.x;
    uint t = thread_position_in_threadgroup.x;
    const device T* in = x + row * D;
    float v[PER_THREAD];
    float sum = 0.0f;
    for (int i = 0; i < PER_THREAD; i++) {
        int d = int(t) + i * TG;
        v[i] = d < D ? static_cast<float>(in[d]) : 0.0f;
        sum += v[i] * v[i];
    }
    float mean = threadgroup_sum<TG>(
        sum, partial, thread_index_in_simdgroup, simdgroup_index_in_threadgroup) / D;
    float scale = metal::precise::rsqrt(mean + eps);
    for (int i = 0; i < PER_THREAD; i++) {
        int d = int(t) + i * TG;
        if (d < D) {
            y[row * D + d] = static_cast<T>(v[i] * scale * static_cast<float>(weight[d]));
        }
    }
"""


def _run_norm(factory: KernelFactory) -> None:
    kernel = factory(
        name="norm",
        input_names=["x", "weight", "eps"],
        output_names=["y"],
        header=_NORM_HEADER,
        source=_NORM_SOURCE,
    )
    x, weight = (_array(v).astype(mx.bfloat16) for v in (_NORM_X, _NORM_WEIGHT))
    (y,) = kernel(
        inputs=[x, weight, mx.array(1e-6)],
        template=[("T", mx.bfloat16), ("D", _WIDTH), ("TG", _THREADS)],
        grid=(_ROWS * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    expected *= np.array(weight.astype(mx.float32))
    np.testing.assert_allclose(np.array(y.astype(mx.float32)), expected, rtol=2**-8)


# Running difference of neighbours through threadgroup memory, twice: barriers for read after write and
# for write after read.
_LINE = _values(128)
_DIFFERENCE_SOURCE = """
    threadgroup float tile[64];
    uint i = thread_position_in_grid.x;
    uint t = thread_position_in_threadgroup.x;
    tile[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float once = tile[(t + 1) % 64] - tile[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile[t] = once;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = tile[(t + 1) % 64] - tile[t];
"""


def _run_difference(factory: KernelFactory) -> None:
    kernel = factory(
        name="difference", input_names=["x"], output_names=["y"], header="", source=_DIFFERENCE_SOURCE
    )
    (y,) = kernel(
        inputs=[_array(_LINE)],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(128,)],
        output_dtypes=[mx.float32],
    )
    tiles = _LINE.reshape(2, 64).astype(np.float64)
    for _ in range(2):
        tiles = np.roll(tiles, -1, axis=1) - tiles
    np.testing.assert_allclose(np.array(y).reshape(2, 64), tiles, atol=1e-5)


# Rotation of neighbouring elements by an angle a row, each row one SIMD-group.
_PAIRS, _ANGLES = _values(9, 32), _values(9)
_ROTATE_SOURCE = """
    uint row = thread_position_in_grid.x / 32;
    uint lane = thread_index_in_simdgroup;
    float self = x[row * 32 + lane];
    float other = simd_shuffle_xor(self, 1);
    float angle = simd_broadcast(angles[row], 0);
    float c = metal::precise::cos(angle);
    float s = metal::precise::sin(angle);
    int sign = lane % 2 == 0 ? -1 : 1;
    y[row * 32 + lane] = self * c + float(sign) * other * s;
"""


def _run_rotate(factory: KernelFactory) -> None:
    kernel = factory(
        name="rotate", input_names=["x", "angles"], output_names=["y"], header="", source=_ROTATE_SOURCE
    )
    (y,) = kernel(
        inputs=[_array(_PAIRS), _array(_ANGLES)],
        grid=(9 * 32, 1, 1),
        threadgroup=(96, 1, 1),
        output_shapes=[(9, 32)],
        output_dtypes=[mx.float32],
    )
    wide = (_PAIRS[:, ::2] + 1j * _PAIRS[:, 1::2]) * np.exp(1j * _ANGLES[:, None].astype(np.float64))
    expected = np.stack([wide.real, wide.imag], -1).reshape(9, 32)
    np.testing.assert_allclose(np.array(y), expected, atol=1e-6)


# Rows appended in place to a ring buffer that is an input; the output is a copy of the rows.
_CAPACITY, _NEW = 8, 3
_RING, _NEW_ROWS = _values(_CAPACITY, 16), _values(_NEW, 16)
_APPEND_SOURCE = """
    uint column = thread_position_in_grid.x;
    uint row = thread_position_in_grid.y;
    device T* target = (device T*)ring;
    uint slot = (uint(position) + row) % CAPACITY;
    T value = rows[row * 16 + column];
    target[slot * 16 + column] = value;
    copy[row * 16 + column] = value;
"""


def _run_append(factory: KernelFactory) -> None:
    kernel = factory(
        name="append",
        input_names=["rows", "ring", "position"],
        output_names=["copy"],
        header="",
        source=_APPEND_SOURCE,
    )
    ring = _array(_RING).astype(mx.bfloat16)
    rows = _array(_NEW_ROWS).astype(mx.bfloat16)
    expected = np.array(ring.astype(mx.float32))
    expected[[6, 7, 0]] = np.array(rows.astype(mx.float32))
    with options(writable=("ring",)):
        (copy,) = kernel(
            inputs=[rows, ring, mx.array(1_000_006)],
            template=[("T", mx.bfloat16), ("CAPACITY", _CAPACITY)],
            grid=(16, _NEW, 1),
            threadgroup=(16, 1, 1),
            output_shapes=[rows.shape],
            output_dtypes=[rows.dtype],
        )
    assert mx.array_equal(copy, rows).item()
    np.testing.assert_array_equal(np.array(ring.astype(mx.float32)), expected)


# 4-bit codes, eight to a word, times one scale for 32 values; four words in one load.
_CODES = _random.integers(0, 2**32, 32, dtype=np.uint32)
_SCALES = _values(8).astype(np.float16)
_DEQUANTISE_SOURCE = """
    uint i = thread_position_in_grid.x;
    uint4 words = *(const device uint4*)(codes + 4 * i);
    float scale = scales[i];
    for (int w = 0; w < 4; w++) {
        for (int k = 0; k < 8; k++) {
            y[i * 32 + w * 8 + k] = scale * float(int((words[w] >> (4 * k)) & 0xF) - 8);
        }
    }
"""


def _run_dequantise(factory: KernelFactory) -> None:
    kernel = factory(
        name="dequantise", input_names=["codes", "scales"], output_names=["y"], header="",
        source=_DEQUANTISE_SOURCE,
    )  # fmt: skip
    (y,) = kernel(
        inputs=[_array(_CODES), _array(_SCALES)],
        grid=(8, 1, 1),
        threadgroup=(5, 1, 1),
        output_shapes=[(8, 32)],
        output_dtypes=[mx.float32],
    )
    digits = (_CODES[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 0xF
    expected = (digits.astype(np.float64).reshape(8, 32) - 8) * _SCALES[:, None]
    np.testing.assert_allclose(np.array(y), expected, rtol=1e-6)


SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("norm", _run_norm),
        Subject("difference", _run_difference),
        Subject("rotate", _run_rotate),
        Subject("append", _run_append),
        Subject("dequantise", _run_dequantise),
    )
}

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_STORE = "partial[simdgroup] = value;\n    }\n    "
_READ = "threadgroup_barrier(mem_flags::mem_threadgroup);\n    float once"
_OVERWRITE = "threadgroup_barrier(mem_flags::mem_threadgroup);\n    tile[t] = once"
_IN = "const device T* in = x"

TABLE: tuple[Planted, ...] = (
    # Synchronisation
    Planted("norm", "no barrier after the store", _STORE + _BARRIER, _STORE, Kind.UNINITIALISED),
    Planted("norm", "no barrier after the store, other order", _STORE + _BARRIER, _STORE, Kind.RACE,
            {"order": "reverse"}),
    Planted("difference", "no barrier before the read", _READ, "float once", Kind.RACE,
            {"order": "reverse"}),
    Planted("difference", "no barrier before the overwrite", _OVERWRITE, "tile[t] = once", Kind.RACE),
    Planted("difference", "barrier orders no memory", _READ, _READ.replace("mem_threadgroup", "mem_none"),
            Kind.RACE),
    Planted("difference", "barrier orders the wrong memory", _READ,
            _READ.replace("mem_threadgroup", "mem_device"), Kind.RACE),
    Planted("difference", "simdgroup_barrier is too little", _READ,
            _READ.replace("threadgroup_barrier", "simdgroup_barrier"), Kind.RACE),
    Planted("difference", "barrier that only some threads reach", _READ, "if (t < 40) " + _READ,
            Kind.BARRIER),
    Planted("difference", "return before the barrier", "tile[t] = x[i];",
            "tile[t] = x[i]; if (t > 60) return;", Kind.BARRIER),
    Planted("difference", "barriers of two branches", _BARRIER + "\n    y[i]",
            f"if (t < 32) {{ {_BARRIER} }} else {{ {_BARRIER} }}\n    y[i]", Kind.BARRIER),
    Planted("rotate", "SIMD operation in a branch", "float other = simd_shuffle_xor(self, 1);",
            "float other = 0; if (lane < 30) other = simd_shuffle_xor(self, 1);", Kind.DIVERGENCE),
    Planted("rotate", "threadgroups write the same row", "y[row * 32 + lane]", "y[row % 3 * 32 + lane]",
            Kind.RACE),
    Planted("norm", "every lane stores the same sum, told to mind", "if (lane == 0) {", "if (true) {",
            Kind.RACE, {"same_value_races": True}),
    Planted("append", "rows collide in the ring", "% CAPACITY", "% 2", Kind.RACE),
    Planted("append", "copy read back from the buffer of another thread", "copy[row * 16 + column] = value;",
            "copy[row * 16 + column] = target[slot * 16 + (column + 1) % 16];", Kind.RACE),
    # Bounds
    Planted("norm", "row too long", "d < D ? ", "d < D + 1 ? ", Kind.OUT_OF_BOUNDS),
    Planted("norm", "store beyond the row", "if (d < D) {", "if (d <= D) {", Kind.OUT_OF_BOUNDS),
    Planted("norm", "private array too small", "float v[PER_THREAD]", "float v[PER_THREAD - 1]",
            Kind.OUT_OF_BOUNDS),
    Planted("norm", "threadgroup array too small", "partial[TG / 32];", "partial[TG / 64];",
            Kind.OUT_OF_BOUNDS),
    Planted("difference", "index below zero", "tile[t] = x[i];", "tile[t] = x[i - 1];", Kind.OUT_OF_BOUNDS),
    Planted("append", "position not reduced to the ring", " % CAPACITY", "", Kind.OUT_OF_BOUNDS),
    Planted("dequantise", "relies on a trimmed grid, which CUDA has not", "uint i", "uint i",
            Kind.OUT_OF_BOUNDS, {"round_grid": True}),
    Planted("dequantise", "wrong stride", "codes + 4 * i", "codes + 8 * i", Kind.OUT_OF_BOUNDS),
    # Reads and writes that must not be
    Planted("norm", "elements left unwritten", "if (d < D) {", "if (d < D - 1) {", Kind.UNWRITTEN),
    Planted("norm", "sums up partial sums that are not there", "i < TG / 32; i++", "i <= TG / 32; i++",
            Kind.OUT_OF_BOUNDS),
    Planted("difference", "reads beyond what was written", "tile[(t + 1) % 64] - tile[t];\n    threadgroup_b",
            "tile[t + 1] - tile[t];\n    threadgroup_b", Kind.OUT_OF_BOUNDS),
    Planted("norm", "uninitialised accumulator", "float sum = 0.0f;", "float sum;", Kind.UNINITIALISED),
    Planted("norm", "output used as scratch before it is written", "float mean",
            "sum += float(y[row * D + t]); float mean", Kind.UNINITIALISED),
    Planted("append", "writes to the wrong input", "(device T*)ring", "(device T*)rows - 6 * 16",
            Kind.READ_ONLY),
    # SIMD-groups
    Planted("rotate", "shuffle beyond the SIMD-group", "simd_shuffle_xor(self, 1)",
            "simd_shuffle_xor(self, 32)", Kind.SIMD_LANE),
    Planted("rotate", "broadcast from a lane that has returned", "float angle",
            "if (lane == 0) { y[row * 32] = 0; return; }\n    float angle", Kind.SIMD_LANE),
    Planted("rotate", "wrong partner", "simd_shuffle_xor(self, 1)", "simd_shuffle_xor(self, 2)",
            WRONG_VALUES),
    Planted("rotate", "simd_sum of 64 bits", "simd_shuffle_xor(self, 1)", "simd_sum(long(self))",
            Kind.COMPILE),
    # Undefined behaviour
    Planted("append", "signed overflow", "uint(position) + row",
            "uint((position * 4096) / 4096) + row", Kind.UNDEFINED),
    Planted("rotate", "division by zero", "int sign = ", "int sign = 1 / int(lane) * 0 + ", Kind.UNDEFINED),
    Planted("rotate", "float outside int", "int sign = ", "int sign = int(1e10f + self) * 0 + ",
            Kind.UNDEFINED),
    Planted("dequantise", "vector load at an element's alignment", "float scale", "float scale",
            Kind.MISALIGNED, {"misaligned": True}),
    Planted("norm", "endless loop", "i < TG / 32; i++", "i < TG / 32; i += 0", Kind.TIMEOUT,
            {"timeout_s": 0.2}),
    Planted("norm", "threadgroup memory exhausted", "partial[TG / 32];", "partial[8193];",
            Kind.THREADGROUP_MEMORY),
    # Address spaces
    Planted("norm", "no address space", _IN, "const T* in = x", Kind.ADDRESS_SPACE),
    Planted("norm", "wrong address space", _IN, "const threadgroup T* in = x", Kind.ADDRESS_SPACE),
    Planted("norm", "threadgroup missing in a helper", "threadgroup float* partial", "float* partial",
            Kind.ADDRESS_SPACE),
    Planted("norm", "pointer to a private array without thread", "float sum = 0.0f;",
            "float sum = 0.0f; float* p = v; p[0] = 0.0f;", Kind.ADDRESS_SPACE),
    Planted("norm", "cast drops the address space", "float mean",
            "sum += float(*(T*)in) * 0.0f; float mean", Kind.ADDRESS_SPACE),
    Planted("norm", "threadgroup variable in a helper", "float total = 0.0f;",
            "threadgroup float extra[2]; extra[0] = 0.0f; float total = 0.0f;", Kind.ADDRESS_SPACE),
    Planted("norm", "write through const", "float mean", "in[0] = T(0.0f); float mean", Kind.COMPILE),
    # Dialect
    Planted("norm", "double", "float mean", "double mean", Kind.DIALECT),
    Planted("norm", "std::", "metal::precise::rsqrt", "1.0f / std::sqrt", Kind.DIALECT),
    Planted("rotate", "goto", "int sign", "goto end; end: int sign", Kind.DIALECT),
    Planted("rotate", "lambda", "float c = ", "auto f = [](float v) { return v; }; float c = f(1.0f) * ",
            Kind.DIALECT),
    Planted("norm", "no cast to bfloat", "static_cast<T>(v[i] * scale * static_cast<float>(weight[d]))",
            "v[i] * scale * static_cast<float>(weight[d])", Kind.IMPLICIT_BFLOAT),
    Planted("norm", "recursion", "    float total = 0.0f;",
            "    if (lane > 64) { return threadgroup_sum<TG>(value, partial, lane - 64, simdgroup); }\n"
            "    float total = 0.0f;", Kind.RECURSION),
    Planted("norm", "erf does not exist", "metal::precise::rsqrt", "metal::erf", Kind.COMPILE),
    Planted("norm", "ambiguous overload", "float sum = 0.0f;", "float sum = 0.0f * min(3, t);", Kind.COMPILE),
    Planted("norm", "thread attribute in the header", "float total = 0.0f;",
            "float total = 0.0f * thread_index_in_threadgroup;", Kind.COMPILE),
    # No bugs
    Planted("norm", "order of the reduction", "float sum", "float sum", NOTHING, {"sum_order": "descending"}),
    Planted("append", "device memory unaligned", "uint slot", "uint slot", NOTHING, {"misaligned": True}),
    Planted("norm", "threadgroup array larger than needed", "partial[TG / 32];", "partial[32];", NOTHING),
    Planted("norm", "every lane stores the same sum", "if (lane == 0) {", "if (true) {", NOTHING),
)  # fmt: skip


def report(rows: Sequence[Planted] = TABLE, subjects: Mapping[str, Subject] | None = None) -> int:
    """Print what caught each bug. Returns the number of rows that went otherwise than expected."""
    subjects = SUBJECTS if subjects is None else subjects
    failures = 0
    for row in rows:
        found, description = catch(subjects[row.subject], row)
        good = row.expected in found
        failures += not good
        verdict = "ok  " if good else f"BAD (expected {row.expected}) "
        print(f"{verdict}{row.subject:22} {row.bug:52} {description[:150]}")
    print(f"{len(rows) - failures} of {len(rows)} as expected")
    return failures


if __name__ == "__main__":
    # They are made with what this module has, so it cannot import them at its head.
    from tests.kernels import planted as kernels

    sys.exit(report() + report(kernels.TABLE, kernels.SUBJECTS) > 0)
