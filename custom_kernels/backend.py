"""How a kernel's one Metal text runs: on Metal, on CUDA, or not at all (its reference in mx ops).

A kernel is a `.metal` file that holds the body of a Metal function; MLX writes the signature. On CUDA the
same text is read through `prelude/metal.cuh`. A kernel is used after its first-use self-check against the
reference; one that does not build or does not agree is replaced by the reference, with one warning.

`SPARK25_KERNELS=off` switches all kernels off, `SPARK25_KERNELS=-name,-name` some of them.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from hashlib import blake2s
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

_HERE = Path(__file__).parent
SWITCH = "SPARK25_KERNELS"
_PRELUDE = "prelude/metal.cuh"
REFERENCE = "reference"

Constant = int | bool | float | mx.Dtype
Launch = Callable[..., list[mx.array]]
Factory = Callable[..., Launch]
# Outputs of the kernel and of its reference on the same small inputs.
Check = Callable[..., tuple[Sequence[mx.array], Sequence[mx.array]]]

# Largest difference of a kernel from its reference, relative to the largest magnitude: two roundings apart.
_TOLERANCE = {mx.float32: 1e-5, mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6}

# Characters of a reported failure.
_LONGEST = 300

_REGISTRY: dict[str, Kernel] = {}
_local = threading.local()
_forced: tuple[str, Factory] | None = None
_suspended: frozenset[str] = frozenset()


def backend_name() -> str:
    """ "metal", "cuda" or "reference": what the default device of this process can run."""
    if _forced is not None:
        return _forced[0]
    if mx.default_device().type != mx.DeviceType.gpu:
        return REFERENCE
    return "metal" if mx.metal.is_available() else "cuda"


def fits_grid(groups: int) -> bool:
    """Whether a launch may have so many threadgroups along y or z: CUDA has a limit."""
    return groups < 1 << 16 or backend_name() == "metal"


def backend_key() -> object:
    """What prepared launches are valid for: `backend_name`, or what `forced` has put in its place."""
    return _forced or backend_name()


def is_forced() -> bool:
    """Whether kernels run through what `forced` gave."""
    return _forced is not None


@contextmanager
def forced(name: str, factory: Factory) -> Iterator[None]:
    """Run all kernels through `factory`, which is called as `mx.fast.metal_kernel` is. For simulators."""
    global _forced
    before, _forced = _forced, (name, factory)
    try:
        yield
    finally:
        _forced = before


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside, these kernels give way to their references, and these fusions (`fusions.FUSIONS`) are off.

    Verdicts of self-checks are neither used nor made for them, so they are as before afterwards.
    """
    global _suspended
    before, _suspended = _suspended, _suspended.union(names)
    try:
        yield
    finally:
        _suspended = before


def suspended() -> frozenset[str]:
    """The names that `without` switches off now."""
    return _suspended


@contextmanager
def differentiable() -> Iterator[None]:
    """Inside, every kernel gives way to its reference, which mx.grad can differentiate."""
    before = getattr(_local, "differentiable", False)
    _local.differentiable = True
    try:
        yield
    finally:
        _local.differentiable = before


def kernel_routes() -> dict[str, str]:
    """Kernel name -> what a call of it uses now: a backend's name, or "reference" and why."""
    return {name: kernel.route() for name, kernel in sorted(_REGISTRY.items())}


def registered() -> dict[str, Kernel]:
    """All kernels by name."""
    return dict(_REGISTRY)


class Kernel:
    """One Metal text and everything needed to launch it.

    Args:
        name: the kernel is `<name>.metal` beside this file.
        inputs, outputs: names of the buffers, in order.
        check: called with the key of a variant on its first use; gives the outputs of kernel and reference.
        headers: `.metal` files of helper functions that the body calls.
        defines: symbols that select a variant of the body by `#ifdef NAME` or `#if defined(NAME)`.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: Sequence[str],
        outputs: Sequence[str],
        check: Check,
        headers: Sequence[str] = (),
        defines: Sequence[str] = (),
        variant: str = "",
    ) -> None:
        self.name = variant or name
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.check = check
        self.source = select(read_source(f"{name}.metal"), frozenset(defines))
        self.headers = [f"{header}.metal" for header in headers]
        self._built: dict[tuple[Any, ...], Launch] = {}
        self._in_check = False
        self._verdicts: dict[tuple[Any, ...], str] = {}
        _REGISTRY[self.name] = self

    def ready(self, *key: Any) -> bool:
        """Whether to launch this variant (True) or to call the reference; `key` is passed on to the check."""
        if self._in_check:
            return True
        if getattr(_local, "differentiable", False) or self.name in _suspended:
            return False
        backend = backend_name()
        if backend == REFERENCE:
            return False
        verdict = self._verdicts.get((backend, *key))
        if verdict is None:
            verdict = self._verdicts[backend, *key] = self._first_use(key)
        return verdict == ""

    def route(self) -> str:
        backend = backend_name()
        if backend == REFERENCE:
            return REFERENCE
        if self.name in switched_off():
            return f"{REFERENCE} (switched off by {SWITCH})"
        if self.name in _suspended:
            return f"{REFERENCE} (suspended)"
        failed = next((why for (name, *_), why in self._verdicts.items() if name == backend and why), "")
        return f"{REFERENCE} ({failed})" if failed else backend

    def bind(
        self,
        *,
        constants: Mapping[str, Constant],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> Launch:
        """A launch with everything fixed but the inputs: calling it costs as little as MLX's own call does.

        Args:
            constants: compile-time constants and types of the body, by name. Each combination is compiled
                once, so what changes from token to token is an input instead.
            grid: threads, in whole threadgroups: CUDA has no others.

        Returns:
            Takes `inputs=[...]` and gives the outputs.
        """
        if any(n % group for n, group in zip(grid, threadgroup, strict=True)):
            raise ValueError(f"kernel {self.name}: grid {grid} is not in whole threadgroups of {threadgroup}")
        return partial(
            self._specialised(tuple(constants.items())),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[tuple(shape) for shape in output_shapes],
            output_dtypes=list(output_dtypes),
        )

    def launch(self, inputs: Sequence[mx.array], **binding: Any) -> list[mx.array]:
        """`bind` and call it once; arguments as those of `bind`."""
        return self.bind(**binding)(inputs=inputs)

    def error(self, *key: Any) -> float:
        """Largest difference of the variant from its reference on the check's inputs, relative to the largest
        magnitude of each output and in units of what is tolerated: right up to 1."""
        # The check launches through the same functions as everybody: to them the kernel is usable meanwhile.
        self._in_check = True
        try:
            outputs = self.check(*key)
        finally:
            self._in_check = False
        worst = 0.0
        for ours, reference in zip(*outputs, strict=True):
            worst = max(worst, relative_difference(ours, reference) / _TOLERANCE.get(ours.dtype, 0.5 / 2**31))
        return worst

    def trial(self, *key: Any) -> tuple[float, str]:
        """Check a variant now and hold it to the outcome from here on.

        Returns:
            (`error` of the variant, or inf when it does not run; why its reference runs instead, or "").
        """
        error = float("inf")
        try:
            error = self.error(*key)
            why = "" if error <= 1 else f"differs from its reference by {error:.3g} times the tolerance"
        except Exception as failure:
            why = f"does not run: {one_line(failure)}"
        self._verdicts[backend_name(), *key] = why
        return error, why

    def _first_use(self, key: tuple[Any, ...]) -> str:
        if self.name in switched_off():
            return "switched off"
        _, why = self.trial(*key)
        if why:
            warnings.warn(f"kernel {self.name} {why}; its reference in mx ops runs instead", stacklevel=3)
        return why

    def _specialised(self, constants: tuple[tuple[str, Constant], ...]) -> Launch:
        backend = backend_name()
        key = (backend, _forced, constants)
        built = self._built.get(key)
        if built is None:
            source = "".join(map(_declaration, constants)) + self.source
            factory: Any
            if _forced is not None:
                factory = _forced[1]
            elif backend == "cuda":
                factory = mx.fast.cuda_kernel
            else:
                factory = mx.fast.metal_kernel
            header = self._header(source, dict(constants).get("T"), cuda=factory is mx.fast.cuda_kernel)
            if factory is mx.fast.cuda_kernel:
                source = for_cuda(source)
            # MLX 0.32.2 takes kernels of one name for the same.
            digest = blake2s((header + source).encode(), digest_size=4).hexdigest()
            built = self._built[key] = factory(
                name=f"spark25_{self.name}_{digest}",
                input_names=self.inputs,
                output_names=self.outputs,
                source=source,
                header=header,
            )
        return built

    def _header(self, source: str, dtype: Constant | None, *, cuda: bool) -> str:
        """The helper functions that the body needs, directly or not: a short text costs less to dispatch."""
        files = [_PRELUDE] * cuda + self.headers
        kinds = (mx.float32, mx.float32 if dtype is None else dtype)
        other = "|".join(rf"\b{name}\*" for kind, name in _TYPES.items() if kind not in kinds)
        # A function of the prelude stands in for a helper of the same name.
        ours = _prelude_names() if cuda else frozenset()
        pieces = [
            piece
            for file in files
            for piece in _pieces(file)
            if file not in self.headers
            or ((dtype is None or not re.search(other, piece)) and not _defined(piece) & ours)
        ]
        needed: list[str] = []
        while True:
            words = set(re.findall(r"\w+", source + "".join(needed)))
            wanted = [p for p in pieces if not (names := _defined(p)) or not names.isdisjoint(words)]
            if wanted == needed:
                return "".join(needed)
            needed = wanted


def relative_difference(ours: mx.array, reference: mx.array) -> float:
    """Largest difference of two arrays, relative to the reference's largest magnitude."""
    a, b = ours.astype(mx.float32), reference.astype(mx.float32)
    scale = mx.maximum(mx.max(mx.abs(b)), 1e-30)
    relative = float(np.array(mx.max(mx.abs(a - b)) / scale))
    # NaN compares false with everything: count it as the largest difference there is.
    return relative if relative == relative else float("inf")


def one_line(failure: Exception) -> str:
    """The beginning of a failure's message: a compiler's says first what did not build."""
    return " ".join(str(failure).split())[:_LONGEST] or repr(failure)


# Metal's names of the types; the prelude gives CUDA the same.
_TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}


def _declaration(constant: tuple[str, Constant]) -> str:
    name, value = constant
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_TYPES[value]};\n"
    if isinstance(value, float):
        return f"constexpr float {name} = {value!r}f;\n"
    kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
    return f"constexpr {kind} {name} = {text};\n"


_INCLUDE = re.compile(r'^#include "(\w+\.metal)"\n', re.MULTILINE)


@cache
def read_source(name: str) -> str:
    """A kernel source and what it includes, less comments and indentation: MLX hashes it at each dispatch."""
    return _INCLUDE.sub(lambda match: read_source(match[1]), "".join(_pieces(name)))


_CONDITION = re.compile(r"#(ifdef|if|elif|else|endif)\b(?: (?:defined\()?(\w+)\)?)?$")


def select(source: str, defines: frozenset[str]) -> str:
    """A body without the lines that `#ifdef` and its kin leave out, and without those directives.

    MLX would hand all of them to the compiler, at the cost of a longer text at every dispatch.
    """
    kept = []
    # For each open condition: whether its branch is taken now, and whether any of its branches was.
    conditions: list[tuple[bool, bool]] = []
    for line in source.splitlines(keepends=True):
        if (directive := _CONDITION.match(line.strip())) is None:
            if all(taken for taken, _ in conditions):
                kept.append(line)
            continue
        kind, name = directive.groups()
        if kind in ("ifdef", "if"):
            conditions.append((name in defines, name in defines))
            continue
        _, was_taken = conditions.pop()
        if kind != "endif":
            taken = not was_taken and (kind == "else" or name in defines)
            conditions.append((taken, was_taken or taken))
    return "".join(kept)


@cache
def _pieces(name: str) -> tuple[str, ...]:
    """`read_source` in the pieces that blank lines part in the file."""
    paragraphs = re.split(r"\n\s*\n", (_HERE / name).read_text())
    plain = (re.sub(r"//[^\n]*", "", paragraph) for paragraph in paragraphs)
    pieces = (re.sub(r"\s*\n\s*", "\n", paragraph).strip() for paragraph in plain)
    return tuple(piece + "\n" for piece in pieces if piece)


def _defined(piece: str) -> frozenset[str]:
    """Names of the functions that a piece defines."""
    return frozenset(re.findall(r"METAL_FUNC [\w:]+ (\w+)\(", piece))


@cache
def _prelude_names() -> frozenset[str]:
    return frozenset().union(*map(_defined, _pieces(_PRELUDE)))


@cache
def switched_off() -> frozenset[str]:
    """Kernels that `SPARK25_KERNELS` switches off."""
    value = os.environ.get(SWITCH, "").strip()
    if value in ("", "on"):
        return frozenset()
    if value == "off":
        return frozenset(_REGISTRY)
    names = {part.strip() for part in value.split(",")}
    wrong = sorted(n for n in names if not n.startswith("-") or n[1:] not in _REGISTRY)
    if wrong:
        known = ", ".join(sorted(_REGISTRY))
        raise ValueError(f"{SWITCH}: {wrong[0]!r} is not 'off' or '-' and one of {known}")
    return frozenset(name[1:] for name in names)


# Metal's thread attributes as CUDA computes them.
_FLAT = "(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))"
_ATTRIBUTES = {
    "thread_position_in_threadgroup": "const uint3 {} = make_uint3(threadIdx.x, threadIdx.y, threadIdx.z);",
    "threadgroup_position_in_grid": "const uint3 {} = make_uint3(blockIdx.x, blockIdx.y, blockIdx.z);",
    "threads_per_threadgroup": "const uint3 {} = make_uint3(blockDim.x, blockDim.y, blockDim.z);",
    "threads_per_grid": "const uint3 {} = make_uint3(gridDim.x * blockDim.x, gridDim.y * blockDim.y, "
    "gridDim.z * blockDim.z);",
    "threadgroups_per_grid": "const uint3 {} = make_uint3(gridDim.x, gridDim.y, gridDim.z);",
    "thread_position_in_grid": "const uint3 {} = make_uint3(blockIdx.x * blockDim.x + threadIdx.x, "
    "blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z);",
    "thread_index_in_threadgroup": "const uint {} = " + _FLAT + ";",
    "thread_index_in_simdgroup": "const uint {} = " + _FLAT + " & 31;",
    "simdgroup_index_in_threadgroup": "const uint {} = " + _FLAT + " / 32;",
}


def for_cuda(source: str) -> str:
    """The body that `mx.fast.cuda_kernel` takes for a Metal body."""
    lines = ["using namespace metal;"]
    lines += [line.format(name) for name, line in _ATTRIBUTES.items() if re.search(rf"\b{name}\b", source)]
    return "\n".join(lines) + "\n" + source


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= max(n, 1)."""
    return max(1, -(-n // multiple)) * multiple
