"""How kernels are simulated: the `Options` record and the context manager that sets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

Order = Literal["forward", "reverse", "shuffle"]
SumOrder = Literal["butterfly", "butterfly-reversed", "ascending", "descending"]


@dataclass(frozen=True)
class Options:
    """Settings of a simulated launch. A correct kernel gives correct results under all of them."""

    writable: tuple[str, ...] = ()
    """Inputs that the kernel may write through a cast to `device T*`. What it writes lands in the
    memory of the caller's own array."""
    partial_outputs: tuple[str, ...] = ()
    """Outputs of which the kernel may leave elements unwritten."""
    order: Order = "forward"
    """In which order the threads of a threadgroup run between two synchronisation points.
    "reverse" also runs the threadgroups from last to first."""
    seed: int = 1
    """Seed of order="shuffle"."""
    sum_order: SumOrder = "butterfly"
    """In which order simd_sum and its kin combine the lanes. Metal promises none."""
    misaligned: bool = False
    """Place buffers and threadgroup variables at addresses aligned to one element only. This is all
    that MLX promises of a slice, and shows vector loads that need more."""
    round_grid: bool = False
    """Launch whole threadgroups, as CUDA does, where Metal would trim the last ones to the grid."""
    same_value_races: bool = False
    """Report threads that write one value to one place without a barrier. Harmless on a GPU."""
    fma_contraction: bool = False
    """Fuse a * b + c into one rounding, as a GPU compiler may."""
    timeout_s: float = 60.0
    """Seconds after which a launch counts as endless."""

    def __post_init__(self) -> None:
        for name, allowed in (("order", get_args(Order)), ("sum_order", get_args(SumOrder))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"metal_sim option {name}={getattr(self, name)!r}: must be one of {allowed}")
        for name in ("writable", "partial_outputs"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) for item in value):
                raise ValueError(f"metal_sim option {name}={value!r}: must be a tuple of names")
        if self.timeout_s <= 0:
            raise ValueError(f"metal_sim option timeout_s={self.timeout_s}: must be positive")


_current: ContextVar[Options] = ContextVar("metal_sim_options", default=Options())  # noqa: B039 (frozen)


def current_options() -> Options:
    """The options in force."""
    return _current.get()


@contextmanager
def options(**changes: Any) -> Iterator[Options]:
    """Change some `Options` fields for the kernels called within the `with` block.

    Blocks nest: what the inner one does not name stays as the outer one set it.
    """
    known = {field.name for field in fields(Options)}
    if unknown := sorted(set(changes) - known):
        raise TypeError(f"metal_sim has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
