"""`metal_kernel`: the call of `mx.fast.metal_kernel`, executed on the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from . import compiler, executor, strict
from .errors import Finding, Kind, MetalSimError
from .executor import Buffer
from .options import Options, current_options
from .source import GeneratedSource, InputType, TemplateArgument, generate

Array = npt.NDArray[Any]

MAXIMUM_THREADS = 1024
"""Threads in a threadgroup."""
MAXIMUM_BUFFERS = 31
"""Buffer parameters of a kernel, those for shapes and strides included."""

# (name in MLX's Metal headers, numpy type of the same size)
_DTYPES: dict[mx.Dtype, tuple[str, type]] = {
    mx.bool_: ("bool", np.bool_),
    mx.uint8: ("uint8_t", np.uint8),
    mx.uint16: ("uint16_t", np.uint16),
    mx.uint32: ("uint32_t", np.uint32),
    mx.uint64: ("uint64_t", np.uint64),
    mx.int8: ("int8_t", np.int8),
    mx.int16: ("int16_t", np.int16),
    mx.int32: ("int32_t", np.int32),
    mx.int64: ("int64_t", np.int64),
    mx.float16: ("float16_t", np.float16),
    mx.bfloat16: ("bfloat16_t", np.uint16),
    mx.float32: ("float", np.float32),
}


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, Any] | None = None,
) -> SimulatedKernel:
    """Stand-in for `mx.fast.metal_kernel`, with the same parameters.

    `compile_options` is accepted and has no effect: every math_mode runs as "safe". How kernels run is
    set by `metal_sim.options`.
    """
    del compile_options
    return SimulatedKernel(
        name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs
    )


class SimulatedKernel:
    """What `metal_kernel` returns; call it as one calls the kernels of MLX."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
    ) -> None:
        if not output_names:
            raise ValueError(f"kernel '{name}': output_names is empty")
        self.name = name
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self.atomic_outputs = atomic_outputs

    def generated_source(
        self,
        inputs: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] | None = None,
    ) -> GeneratedSource:
        """The Metal source for these types, as MLX would compile it."""
        kinds = [InputType(self._metal_type(x.dtype), x.ndim, x.size) for x in inputs]
        return generate(
            self.name,
            self.header,
            self.source,
            list(zip(self.input_names, kinds, strict=True)),
            [(n, self._metal_type(d)) for n, d in zip(self.output_names, output_dtypes, strict=True)],
            [self._template_argument(n, value) for n, value in template or ()],
            self.atomic_outputs,
        )

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Run the kernel. Parameters as of MLX's kernels; `stream` has no effect.

        Raises MetalSimError for whatever Metal would refuse or leave undefined.
        """
        del stream
        self._require_equal("inputs", len(inputs), len(self.input_names))
        self._require_equal("output_shapes", len(output_shapes), len(self.output_names))
        self._require_equal("output_dtypes", len(output_dtypes), len(self.output_names))
        options = current_options()
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        source = self.generated_source(arrays, output_dtypes, template)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{source.text}\n```")
        self._check_launch(source, grid, threadgroup)
        if options.round_grid:
            grid = tuple(-(-g // min(t, g)) * min(t, g) for g, t in zip(grid, threadgroup, strict=True))  # type: ignore[assignment]

        strict.check(source)
        library = compiler.compile_kernel(source, options.fma_contraction)

        buffers: dict[str, Buffer] = {}
        for name, array in zip(self.input_names, arrays, strict=True):
            buffers.update(self._input_buffers(name, array, options))
        outputs = {
            name: self._output_memory(shape, dtype, init_value)
            for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True)
        }
        for name, memory in outputs.items():
            buffers[name] = Buffer(
                memory,
                writable=True,
                poisoned=init_value is None,
                may_be_partial=name in options.partial_outputs,
            )
        self._check_aliases(buffers)

        arguments = [
            p.name if p.role in ("input", "output", "attribute") else f"{p.name}_{p.role}"
            for p in source.parameters
        ]
        executor.launch(library, source, buffers, arguments, grid, threadgroup, options)
        return [_to_mlx(memory, dtype) for memory, dtype in zip(outputs.values(), output_dtypes, strict=True)]

    # -- checks ---------------------------------------------------------------------------------------

    def _fail(self, message: str, buffer: str | None = None) -> MetalSimError:
        return MetalSimError(self.name, [Finding(Kind.LAUNCH, message, buffer=buffer)])

    def _require_equal(self, what: str, given: int, wanted: int) -> None:
        if given != wanted:
            raise ValueError(f"kernel '{self.name}': {what} has {given} entries, must have {wanted}")

    def _metal_type(self, dtype: mx.Dtype) -> str:
        if dtype not in _DTYPES:
            raise TypeError(f"kernel '{self.name}': metal_sim has no {dtype}")
        return _DTYPES[dtype][0]

    def _template_argument(self, name: str, value: Any) -> TemplateArgument:
        if isinstance(value, mx.Dtype):
            return TemplateArgument(name, self._metal_type(value))
        if isinstance(value, int):  # bool included
            return TemplateArgument(name, value)
        raise TypeError(f"kernel '{self.name}': template argument {name}={value!r} is no int, bool or dtype")

    def _check_launch(self, source: GeneratedSource, grid: Sequence[int], threadgroup: Sequence[int]) -> None:
        for what, sizes in (("grid", grid), ("threadgroup", threadgroup)):
            if len(sizes) != 3 or min(sizes) < 1:
                raise self._fail(f"{what}={tuple(sizes)} must be three positive sizes")
        if math.prod(threadgroup) > MAXIMUM_THREADS:
            raise self._fail(f"threadgroup={tuple(threadgroup)} has more than {MAXIMUM_THREADS} threads")
        count = sum(parameter.role != "attribute" for parameter in source.parameters)
        if count > MAXIMUM_BUFFERS:
            raise self._fail(f"{count} buffers; Metal has {MAXIMUM_BUFFERS}")

    def _check_aliases(self, buffers: dict[str, Buffer]) -> None:
        """Every buffer is simulated in memory of its own, so shared memory would go unnoticed."""
        for name, other in itertools.permutations(buffers, 2):
            if buffers[name].writable and np.may_share_memory(buffers[name].memory, buffers[other].memory):
                raise self._fail(f"'{name}' is written and shares memory with '{other}'", name)

    # -- memory ---------------------------------------------------------------------------------------

    def _input_buffers(self, name: str, array: mx.array, options: Options) -> dict[str, Buffer]:
        """The buffer of an input, and those that describe its shape."""
        view = _host_view(array)
        writable = name in options.writable
        strides = [stride // view.itemsize for stride in view.strides]
        if view.flags.c_contiguous:
            data = Buffer(view, writable=writable)
        elif writable:
            raise self._fail(
                f"input '{name}' is written but not row-contiguous: MLX would copy it and lose the writes",
                name,
            )
        elif self.ensure_row_contiguous:
            view = np.ascontiguousarray(view)
            strides = [stride // view.itemsize for stride in view.strides]
            data = Buffer(view)
        else:
            data = _strided_buffer(view)
        return {
            name: data,
            f"{name}_shape": Buffer(np.array(view.shape, np.int32)),
            f"{name}_strides": Buffer(np.array(strides, np.int64)),
            f"{name}_ndim": Buffer(np.array(view.ndim, np.int32)),
        }

    @staticmethod
    def _output_memory(shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Array:
        if init_value is None:
            return np.empty(tuple(shape), _DTYPES[dtype][1])
        return _host_view(mx.full(tuple(shape), init_value, dtype=dtype)).copy()


def _host_view(array: mx.array) -> Array:
    """The memory of an array itself, not a copy; bfloat16 as uint16."""
    mx.eval(array)
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
        mx.eval(array)
    return np.array(array, copy=False)


def _to_mlx(memory: Array, dtype: mx.Dtype) -> mx.array:
    array = mx.array(memory)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


def _strided_buffer(view: Array) -> Buffer:
    """A copy of a strided array with its strides, and a mask of the bytes between its elements."""
    spans = [(size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)]
    if min(spans) < 0:
        raise ValueError("metal_sim takes no input with negative strides")
    elements = sum(spans) // view.itemsize + 1
    memory = np.zeros(elements, view.dtype)
    np.lib.stride_tricks.as_strided(memory, view.shape, view.strides)[...] = view
    is_gap = np.ones(elements, np.uint8)
    byte_strides = [stride // view.itemsize for stride in view.strides]
    np.lib.stride_tricks.as_strided(is_gap, view.shape, byte_strides)[...] = 0
    return Buffer(memory, gaps=np.repeat(is_gap, view.itemsize))
