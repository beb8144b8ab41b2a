"""The bridge to runtime/runtime.cpp: buffers and options in, findings out."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .compiler import Library, runtime_library
from .errors import Finding, Kind, MetalSimError, ThreadId
from .options import Options
from .source import THREAD_ATTRIBUTES, GeneratedSource

_ORDERS = {"forward": 0, "reverse": 1, "shuffle": 2}
_SUM_ORDERS = {"butterfly": 0, "butterfly-reversed": 1, "ascending": 2, "descending": 3}
_ATTRIBUTE_NUMBERS = {name: number for number, (name, _) in enumerate(THREAD_ATTRIBUTES)}
_MAXIMUM_FINDINGS = 16

_WRITABLE, _POISONED, _MAY_BE_PARTIAL = 1, 2, 4


class _BufferSpec(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("host", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint32),
        ("gaps", ctypes.c_void_p),
    )


class _ParameterSpec(ctypes.Structure):
    _fields_ = (("is_attribute", ctypes.c_uint32), ("index", ctypes.c_uint32))


class _LaunchSpec(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(_ParameterSpec)),
        ("buffers", ctypes.POINTER(_BufferSpec)),
        ("parameter_count", ctypes.c_uint32),
        ("buffer_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("sum_order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("misaligned", ctypes.c_uint32),
        ("same_value_races", ctypes.c_uint32),
        ("timeout_s", ctypes.c_double),
    )


class _FindingRecord(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char * 24),
        ("buffer", ctypes.c_char * 64),
        ("text", ctypes.c_char * 256),
        ("code_offset", ctypes.c_uint64),
        ("line", ctypes.c_uint32),
        ("thread", ctypes.c_int32),
        ("lane", ctypes.c_uint32),
        ("simdgroup", ctypes.c_uint32),
        ("threadgroup", ctypes.c_uint32 * 3),
    )


@dataclass(frozen=True)
class Buffer:
    """Memory for one buffer parameter."""

    memory: npt.NDArray[Any]
    """C-contiguous. Read at the start of the launch and, if writable, written at its end."""
    writable: bool = False
    poisoned: bool = False
    """Starts uninitialised, whatever `memory` holds."""
    may_be_partial: bool = False
    gaps: npt.NDArray[np.uint8] | None = None
    """One byte per byte of `memory`, 1 where a strided input has no element."""

    def spec(self, name: str, misaligned: bool) -> _BufferSpec:
        flags = _WRITABLE * self.writable | _POISONED * self.poisoned | _MAY_BE_PARTIAL * self.may_be_partial
        gaps = None if self.gaps is None else self.gaps.ctypes.data
        offset = self.memory.itemsize if misaligned else 0
        return _BufferSpec(name.encode(), self.memory.ctypes.data, self.memory.nbytes, flags, offset, gaps)


@functools.cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(runtime_library()))


_lock = threading.Lock()  # the runtime has one launch at a time


def launch(
    library: Library,
    source: GeneratedSource,
    buffers: Mapping[str, Buffer],
    arguments: Sequence[str],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    options: Options,
) -> None:
    """Run a compiled kernel. `arguments` names, for every parameter, a buffer or a thread attribute.

    Raises MetalSimError with everything that was found.
    """
    numbers = {name: number for number, name in enumerate(buffers)}
    parameters = (_ParameterSpec * len(arguments))()
    for slot, (parameter, argument) in enumerate(zip(source.parameters, arguments, strict=True)):
        is_attribute = parameter.role == "attribute"
        parameters[slot] = _ParameterSpec(
            is_attribute, _ATTRIBUTE_NUMBERS[argument] if is_attribute else numbers[argument]
        )
    specs = (_BufferSpec * len(buffers))(
        *(buffer.spec(name, options.misaligned) for name, buffer in buffers.items())
    )
    spec = _LaunchSpec(
        library.entry, parameters, specs, len(arguments), len(buffers),
        (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*threadgroup),
        _ORDERS[options.order], _SUM_ORDERS[options.sum_order], options.seed,
        options.misaligned, options.same_value_races, options.timeout_s,
    )  # fmt: skip
    records = (_FindingRecord * _MAXIMUM_FINDINGS)()
    with _lock:
        count = _runtime().msim_launch(ctypes.byref(spec), records, _MAXIMUM_FINDINGS)
    if count < 0:
        raise MemoryError("metal_sim: cannot reserve 32 GiB of addresses for the buffers")
    if count:
        findings = [_finding(record, library, source) for record in records[:count]]
        raise MetalSimError(source.kernel_name, findings)


def _finding(record: _FindingRecord, library: Library, source: GeneratedSource) -> Finding:
    line = record.line or (library.line_of(record.code_offset) if record.code_offset else 0)
    thread = None
    if record.thread >= 0:
        x, y, z = record.threadgroup
        thread = ThreadId(record.thread, record.lane, record.simdgroup, (x, y, z))
    return Finding(
        kind=Kind(record.kind.decode()),
        message=record.text.decode(),
        line=line,
        place=source.place(line),
        source_line=source.line_text(line),
        buffer=record.buffer.decode() or None,
        thread=thread,
    )
