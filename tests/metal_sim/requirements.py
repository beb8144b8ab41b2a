"""What a test does without the compiler: skip at a desk, fail in CI."""

from __future__ import annotations

import os

import pytest

from .compiler import toolchain_problem


def require_toolchain() -> None:
    """Return if kernels can be simulated here. Otherwise skip the test, or fail it where CI=true."""
    problem = toolchain_problem()
    if problem is None:
        return
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(problem, pytrace=False)
    pytest.skip(problem)
