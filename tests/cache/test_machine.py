"""The caches under random sequences of operations; numpy or the project's kernel writes in place."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from spark25_mlx.custom_kernels.backend import REFERENCE
from tests.kernels.backends import GPU, SIMULATOR, Backend

from .machine import machine

_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

Geometry = tuple[int, int, int | None]

# (window, slack, snapshot every n tokens) -> examples of the default run.
GEOMETRIES: dict[Geometry, int] = {
    (8, 0, None): 500,
    (8, 4, 5): 500,
    (8, 64, None): 250,
    (64, 0, 50): 250,
    (64, 4, None): 250,
    (64, 64, 100): 250,
    (512, 64, 300): 100,
    (512, 4, None): 100,
}

# A back end runs one in so many of those examples.
ONE_IN = {REFERENCE: 1, SIMULATOR: 5, GPU: 2}


@pytest.mark.timeout(0 if _THOROUGH else 300)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_any_sequence_of_operations(geometry: Geometry, backend: Backend) -> None:
    examples = GEOMETRIES[geometry] // ONE_IN[backend.name]
    run_state_machine_as_test(
        machine(*geometry, backend),
        settings=settings(
            max_examples=25 * examples if _THOROUGH else examples,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
