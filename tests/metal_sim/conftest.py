"""The simulator's own tests need its compiler, except those of pure text."""

import pytest

from . import require_toolchain


@pytest.fixture(autouse=True)
def toolchain(request: pytest.FixtureRequest) -> None:
    if "no_toolchain" not in request.keywords:
        require_toolchain()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_toolchain: runs without the simulator's compiler")
