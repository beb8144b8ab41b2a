"""What the simulator reports: findings, each of one kind, gathered in a `MetalSimError`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kinds of defect. The first group is found without running the kernel."""

    COMPILE = "compile"
    """Not valid C++, or a Metal function called with arguments it does not take."""
    DIALECT = "dialect"
    """Valid C++ that Metal does not have: double, std::, goto, new, lambdas, ..."""
    ADDRESS_SPACE = "address-space"
    """A missing or wrong device, constant, threadgroup or thread."""
    IMPLICIT_BFLOAT = "implicit-bfloat"
    """A float that becomes a bfloat without the explicit cast that Metal asks for."""
    RECURSION = "recursion"
    """A function that calls itself, directly or through others."""

    OUT_OF_BOUNDS = "out-of-bounds"
    """An access outside every buffer, threadgroup variable or fixed-size array."""
    READ_ONLY = "read-only"
    """A write to an input that was not declared writable."""
    UNINITIALISED = "uninitialised"
    """A read of an output, threadgroup variable or local that nothing has written."""
    UNWRITTEN = "unwritten"
    """Output elements that no thread has written."""
    RACE = "race"
    """Two accesses by different threads, at least one a write, with no barrier between them."""
    BARRIER = "barrier"
    """A threadgroup barrier that not every thread of the threadgroup reaches."""
    DIVERGENCE = "divergence"
    """A SIMD-group operation that only some lanes of the SIMD-group reach."""
    SIMD_LANE = "simd-lane"
    """A shuffle or broadcast from a lane that is outside the SIMD-group or inactive."""
    MISALIGNED = "misaligned"
    """A vector access at an address that is not a multiple of the vector's alignment."""
    UNDEFINED = "undefined"
    """Signed overflow, integer division by zero, a float too large for its integer type, ..."""
    THREADGROUP_MEMORY = "threadgroup-memory"
    """More than 32 KiB of threadgroup variables."""
    STRIDE_GAP = "stride-gap"
    """An access to bytes between the elements of a strided input."""
    LAUNCH = "launch"
    """A grid, threadgroup or argument list that Metal would refuse."""
    TIMEOUT = "timeout"
    """A kernel that does not end."""


@dataclass(frozen=True)
class ThreadId:
    """The simulated thread that was running."""

    index: int
    """thread_index_in_threadgroup."""
    lane: int
    """thread_index_in_simdgroup."""
    simdgroup: int
    """simdgroup_index_in_threadgroup."""
    threadgroup: tuple[int, int, int]
    """threadgroup_position_in_grid."""

    def __str__(self) -> str:
        return (
            f"thread {self.index} (lane {self.lane} of simdgroup {self.simdgroup}) "
            f"of threadgroup {self.threadgroup}"
        )


@dataclass(frozen=True)
class Finding:
    """One defect and where it was met."""

    kind: Kind
    message: str
    line: int = 0
    """Line of the generated source, counted from 1; 0 where no line is known."""
    place: str = ""
    """The same line as the author of the kernel counts, such as "body line 3"."""
    source_line: str = ""
    """The text of that line."""
    buffer: str | None = None
    """The buffer or threadgroup variable concerned."""
    thread: ThreadId | None = None

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        text = f"{self.kind}{where}: {self.message}"
        if self.thread is not None:
            text += f" [{self.thread}]"
        return f"{text}\n    {self.source_line}" if self.source_line else text


class MetalSimError(RuntimeError):
    """A kernel does something that Metal forbids or leaves undefined.

    `findings` holds everything that was seen; `kind`, `line`, `source_line`, `buffer` and `thread`
    are those of the first finding.
    """

    def __init__(self, kernel: str, findings: Sequence[Finding]) -> None:
        self.kernel = kernel
        self.findings = tuple(findings)
        super().__init__("\n".join([f"kernel '{kernel}'", *map(str, self.findings)]))

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of all findings."""
        return frozenset(finding.kind for finding in self.findings)

    @property
    def kind(self) -> Kind:
        return self.findings[0].kind

    @property
    def line(self) -> int:
        return self.findings[0].line

    @property
    def source_line(self) -> str:
        return self.findings[0].source_line

    @property
    def buffer(self) -> str | None:
        return self.findings[0].buffer

    @property
    def thread(self) -> ThreadId | None:
        return self.findings[0].thread
