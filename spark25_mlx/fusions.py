"""Which fusions run on which backend, and what each is worth there.

`spark25-mlx bench --switch-off-each` measures what a fusion is worth. Nothing has been measured on Metal: the
launches that a layer of a decode step saves there are counted.
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
        cuda="5 or 6 launches a layer in place of 9 or 10, and launches are dear",
        metal=None,
    ),
    "compiled_step": Fusion(
        what="a step's graph is traced once by mx.compile and then replayed, without Python",
        cuda="a third less host time to build a step's graph, which the device waits for",
        metal="some 250 to 370 calls from Python less a token; nothing was measured",
    ),
}


def is_on(fusion: str, backend: str) -> bool:
    """Whether a fusion runs on a backend."""
    if fusion in suspended() or backend not in ("cuda", "metal"):
        return False
    return getattr(FUSIONS[fusion], backend) is not None
