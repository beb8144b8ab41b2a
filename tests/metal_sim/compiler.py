"""Compilation: clang turns the rewritten source into a shared library, cached by its content."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import mlx.core as mx

from .errors import Finding, Kind, MetalSimError
from .source import KERNEL_FILE, GeneratedSource, to_opencl

HERE = Path(__file__).resolve().parent
CLANG = os.environ.get("METAL_SIM_CLANG", "clang-19")

LANGUAGE = (
    "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc",
    "-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64",  # no double
    "-Xclang", "-cl-single-precision-constant",
    "-fno-color-diagnostics", "-Wno-everything",
)  # fmt: skip
CODE = (
    "-O1", "-fPIC", "-gline-tables-only", "-gdwarf-4", "-mf16c", "-mfma",
    # Round after every operation; keep each access an access of its own.
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    "-fno-vectorize", "-fno-slp-vectorize", "-fno-strict-aliasing",
    "-fno-builtin-memset", "-fno-builtin-memcpy",
    # An uninitialised float is a NaN, an uninitialised integer large.
    "-ftrivial-auto-var-init=pattern",
    # Report every access by a call (threshold 0), leave stack and globals as they are, merge nothing.
    "-fsanitize=kernel-address",
    "-mllvm", "-asan-instrumentation-with-call-threshold=0", "-mllvm", "-asan-kernel-mem-intrinsic-prefix=1",
    "-mllvm", "-asan-stack=0", "-mllvm", "-asan-globals=0", "-mllvm", "-asan-opt=0",
    "-mllvm", "-asan-use-stack-safety=1",
    "-fsanitize=bounds,alignment,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow,return",
)  # fmt: skip


def toolchain_problem() -> str | None:
    """Why kernels cannot be simulated on this machine, or None if they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"metal_sim runs on x86-64 Linux only, not on {platform.machine()} {platform.system()}"
    if shutil.which(CLANG) is None:
        return f"metal_sim needs {CLANG}: apt-get install clang-19, or set METAL_SIM_CLANG to its path"
    for tool in ("ld", "addr2line"):
        if shutil.which(tool) is None:
            return f"metal_sim needs {tool}: apt-get install binutils"
    if not (_mlx_include() / "mlx/backend/metal/kernels/utils.h").exists():
        return f"metal_sim needs the Metal headers of MLX, which are not in {_mlx_include()}"
    return None


@functools.cache
def cache_dir() -> Path:
    """Where compiled kernels are kept: METAL_SIM_CACHE, else the user's cache directory."""
    if configured := os.environ.get("METAL_SIM_CACHE"):
        directory = Path(configured)
    else:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metal_sim"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written
        directory = Path(tempfile.gettempdir()) / f"metal_sim-{os.getuid()}"
        directory.mkdir(parents=True, exist_ok=True)
    return directory


@functools.cache
def _mlx_include() -> Path:
    return Path(mx.__file__).parent / "include"


@functools.cache
def _fixed_inputs() -> bytes:
    """Digest of everything but the kernel that decides the result: headers and compiler."""
    if problem := toolchain_problem():
        raise RuntimeError(problem)
    digest = hashlib.sha256(subprocess.run([CLANG, "--version"], capture_output=True, check=True).stdout)
    digest.update(f"{HERE}\0{_mlx_include()}\0{mx.__version__}\0".encode())  # type: ignore[attr-defined]
    for path in sorted(HERE.glob("include/**/*")):
        if path.is_file():
            digest.update(f"{path}\0".encode() + path.read_bytes())
    return digest.digest()


def cache_path(suffix: str, parts: Iterable[str]) -> Path:
    """The place in the cache of what is made from `parts`."""
    digest = hashlib.sha256(_fixed_inputs())
    for part in parts:
        digest.update(part.encode() + b"\0")
    return cache_dir() / (digest.hexdigest()[:32] + suffix)


def run_clang(
    arguments: Sequence[str], text: str | None = None, clang: str = CLANG
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([clang, *arguments], input=text, capture_output=True, text=True)


def _run_or_fail(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"metal_sim: {' '.join(command)} failed:\n{result.stderr[-4000:]}")


def _temporary(path: Path) -> Path:
    """A name beside `path`, to be renamed to it when complete: parallel test runs share the cache."""
    return path.with_name(f"{path.stem}.{uuid.uuid4().hex}{path.suffix}")


@functools.cache
def runtime_library() -> Path:
    """The compiled runtime."""
    sources = [HERE / "runtime" / name for name in ("runtime.cpp", "fiber.h", "shadow.h")]
    path = cache_path("-runtime.so", [source.read_text() for source in sources])
    if not path.exists():
        output = _temporary(path)
        _run_or_fail([CLANG, "-x", "c++", "-std=c++17", "-O2", "-g1", "-fPIC", "-shared", str(sources[0]),
                      "-lstdc++", "-o", str(output)])  # fmt: skip
        output.replace(path)
    return path


def code_flags(fma_contraction: bool) -> tuple[str, ...]:
    return (*LANGUAGE, *CODE, f"-ffp-contract={'fast' if fma_contraction else 'off'}")


@functools.cache
def precompiled_prelude(flags: tuple[str, ...]) -> Path:
    """The headers in front of every kernel, parsed once: most of a compilation's time otherwise."""
    path = cache_path(".pch", flags)
    if not path.exists():
        output = _temporary(path)
        _run_or_fail([CLANG, *flags, "-I", str(HERE / "include"), "-I", str(_mlx_include()),
                      "-Xclang", "-emit-pch", "-Xclang", "-fno-pch-timestamp",
                      "-c", str(HERE / "include/metal_sim/prelude.h"), "-o", str(output)])  # fmt: skip
        output.replace(path)
    return path


def with_prelude(flags: tuple[str, ...]) -> tuple[str, ...]:
    """`flags` and the precompiled prelude that they go with."""
    return (*flags, "-Xclang", "-include-pch", "-Xclang", str(precompiled_prelude(flags)))


def opencl_text(source: GeneratedSource) -> str:
    """The text that clang sees behind the prelude."""
    return (
        f'#line 1 "{KERNEL_FILE}"\n{to_opencl(source.text)}\n#line 1 "entry"\n'
        'extern "C" void msim_entry(void** words) {'
        f" metal_sim::call({source.kernel_name}{source.template_arguments}, words); }}\n"
    )


class Library:
    """A compiled kernel, loaded into this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = ctypes.CDLL(str(path))
        entry = ctypes.cast(self._handle.msim_entry, ctypes.c_void_p).value
        assert entry is not None
        self.entry: int = entry

    def line_of(self, code_offset: int) -> int:
        """The line of the generated source whose code lies before a return address; 0 if unknown."""
        command = ["addr2line", "-i", "-e", str(self.path), hex(code_offset - 1)]
        frames = subprocess.run(command, capture_output=True, text=True).stdout
        match = re.search(rf"\b{KERNEL_FILE}:(\d+)", frames)  # the innermost frame of the user's text
        return int(match.group(1)) if match else 0


_libraries: dict[tuple[str, bool], Library] = {}


def compile_kernel(source: GeneratedSource, fma_contraction: bool) -> Library:
    """Compile, or take from the cache. The source is taken to have passed `strict.check`."""
    key = (source.text, fma_contraction)
    if key not in _libraries:
        _libraries[key] = Library(_build(source, fma_contraction))
    return _libraries[key]


def _build(source: GeneratedSource, fma_contraction: bool) -> Path:
    text = opencl_text(source)
    flags = code_flags(fma_contraction)
    runtime = runtime_library()
    path = cache_path(".so", [text, *flags, str(runtime)])
    if path.exists():
        return path
    output = _temporary(path)
    code = output.with_suffix(".o")
    try:
        result = run_clang([*with_prelude(flags), "-c", "-", "-o", str(code)], text)
        if result.returncode:
            raise MetalSimError(source.kernel_name, [Finding(Kind.COMPILE, result.stderr[-4000:])])
        _run_or_fail(["ld", "-shared", str(code), str(runtime), "-o", str(output)])
        output.replace(path)
    finally:
        code.unlink(missing_ok=True)
    return path
