"""Which fusions run on which backend, and what each is worth there.

Gains on CUDA are measured (benchmarks/RESULTS.md). On Metal nothing has been measured: those lines count the
launches and the memory traffic that a decode step of the 4B model saves by construction.
"""

from __future__ import annotations

from typing import NamedTuple

from .custom_kernels.backend import suspended


class Fusion(NamedTuple):
    """Backends that a fusion is on for, with the reason; None switches it off there."""

    what: str
    cuda: str | None
    metal: str | None


FUSIONS = {
    "fused_linear": Fusion(
        what="norm, activation and residual inside the linear layers' matrix-vector products (one token)",
        cuda="launches are dear",
        metal=None,
    ),
}


def is_on(fusion: str, backend: str) -> bool:
    """Whether a fusion runs on a backend."""
    if fusion in suspended() or backend not in ("cuda", "metal"):
        return False
    return getattr(FUSIONS[fusion], backend) is not None
