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
        cuda="a step takes 2.2 times as long without it: 5 or 6 launches a layer, not 9 or 10",
        metal=None,
    ),
    "matrix_attention": Fusion(
        what="attention over affine keys and values of 8 or 4 bits as products of matrices, not decoded",
        cuda="a full layer of the 4B reads 120,000 keys of 8 bits in 76 us instead of 160",
        metal=None,
    ),
    "compiled_step": Fusion(
        what="a step's graph is traced once by mx.compile and then replayed, without Python",
        cuda="0.8 ms instead of 1.6 to build a step's graph, where the device waits for the host",
        metal="some 250 to 370 calls from Python less a token; nothing was measured",
    ),
}


def is_on(fusion: str, backend: str) -> bool:
    """Whether a fusion runs on a backend."""
    if fusion in suspended() or backend not in ("cuda", "metal"):
        return False
    return getattr(FUSIONS[fusion], backend) is not None
