"""Runs the Metal kernels of `mx.fast.metal_kernel` on a CPU and reports what they do wrong.

Support code for tests; see README.md in this directory.
"""

from .compiler import toolchain_problem
from .errors import Finding, Kind, MetalSimError, ThreadId
from .kernel import SimulatedKernel, metal_kernel
from .options import Options, current_options, options
from .requirements import require_toolchain

__all__ = [
    "Finding",
    "Kind",
    "MetalSimError",
    "Options",
    "SimulatedKernel",
    "ThreadId",
    "current_options",
    "metal_kernel",
    "options",
    "require_toolchain",
    "toolchain_problem",
]
