"""Every kernel's tests run on what this machine has: the reference in mx ops, the simulator, a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from spark25_mlx.custom_kernels.backend import REFERENCE, Kernel, backend_name
from tests import metal_sim
from tests.kernels.backends import GPU, SIMULATOR, Backend, simulated

NAMES = (REFERENCE, SIMULATOR, GPU)


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in NAMES])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The back end to test. Kernels run without their first-use self-check, which has a test of its own: one
    that is wrong must fail, not give way to its reference."""
    name = request.param
    if name == REFERENCE:
        yield Backend(name)
    elif name == SIMULATOR:
        metal_sim.require_toolchain()
        with simulated() as launches:
            yield Backend(name)
        assert bool(launches) != ("fallback" in request.keywords), f"launched: {launches}"
    elif backend_name() == REFERENCE:
        pytest.skip("MLX has no GPU here")
    else:
        with patch.object(Kernel, "ready", lambda self, *key: True):
            yield Backend(name)
