"""How the tests run the kernels: as the plugin would here, or through a factory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar
from unittest.mock import patch

import mlx.core as mx

from spark25_mlx.custom_kernels.backend import REFERENCE, Factory, Kernel, forced
from tests import metal_sim

SIMULATOR = "simulator"
GPU = "gpu"

F = TypeVar("F")

_numbers = count()


# Names of the inputs that kernels write in place.
CACHE_BUFFERS = ("keys", "key_scales", "key_biases", "values", "value_scales", "value_biases")


def kernel_of(name: str) -> str:
    """The kernel that MLX knows by this name, which also tells its text apart."""
    return name.removeprefix("spark25_").rsplit("_", 1)[0]


@dataclass(frozen=True)
class Backend:
    """What a test runs on.

    Attributes:
        name: "reference", "simulator" or "gpu".
    """

    name: str

    @property
    def is_reference(self) -> bool:
        return self.name == REFERENCE

    def pick(self, kernel: F, reference: F) -> F:
        """The function to test."""
        return reference if self.is_reference else kernel

    def writing(self) -> AbstractContextManager[Any]:
        """Inside, kernels may write their inputs' cache buffers in place."""
        return metal_sim.options(writable=CACHE_BUFFERS) if self.name == SIMULATOR else nullcontext()


@contextmanager
def through(factory: Factory) -> Iterator[None]:
    """Run all kernels through a factory, without their first-use self-checks."""
    # Launches may be kept by the back end's name, so each factory needs one of its own.
    with (
        forced(f"{SIMULATOR} {next(_numbers)}", factory),
        patch.object(Kernel, "ready", lambda self, *key: True),
    ):
        yield


@contextmanager
def simulated() -> Iterator[list[str]]:
    """Run all kernels in the simulator. Yields the names of those launched so far."""
    launches: list[str] = []

    def factory(name: str, **arguments: Any) -> Callable[..., Any]:
        kernel = metal_sim.metal_kernel(name=name, **arguments)

        def launch(**call: Any) -> Any:
            launches.append(kernel_of(name))
            return kernel(**call)

        return launch

    with through(factory):
        yield launches


@contextmanager
def recorded() -> Iterator[list[tuple[str, list[mx.array]]]]:
    """Run no kernel at all: its outputs are zeros. Yields the names and inputs of the launches so far."""
    launches: list[tuple[str, list[mx.array]]] = []

    def factory(name: str, **arguments: Any) -> Callable[..., Any]:
        def launch(*, inputs: list[mx.array], output_shapes: Any, output_dtypes: Any, **call: Any) -> Any:
            launches.append((kernel_of(name), inputs))
            return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    with through(factory):
        yield launches
