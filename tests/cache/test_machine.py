"""The caches under random sequences of operations, and the proof that the search finds faults."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import machine

_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

# (window, slack, snapshot every n tokens) -> examples of the default run.
GEOMETRIES = {
    (8, 0, None): 500,
    (8, 4, 5): 500,
    (8, 64, None): 250,
    (64, 0, 50): 250,
    (64, 4, None): 250,
    (64, 64, 100): 250,
    (512, 64, 300): 100,
    (512, 4, None): 100,
}


@pytest.mark.timeout(0 if _THOROUGH else 300)
@pytest.mark.parametrize(("geometry", "examples"), GEOMETRIES.items(), ids=str)
def test_any_sequence_of_operations(geometry: tuple[int, int, int | None], examples: int) -> None:
    run_state_machine_as_test(
        machine(*geometry),
        settings=settings(
            max_examples=25 * examples if _THOROUGH else examples,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
