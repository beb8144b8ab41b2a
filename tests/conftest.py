"""What all tests share."""

from __future__ import annotations

import os

# Before MLX's first use: on CUDA its fp32 matrix products would otherwise be TF32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import pytest
from hypothesis import settings

from tests import tiny
from tests.tiny import Config, Weights

# HYPOTHESIS_PROFILE=thorough searches longer, at random; the default run is short and always the same.
settings.register_profile("default", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def config() -> Config:
    """A fresh config of the family's form, free to change."""
    return tiny.tiny_config()


@pytest.fixture
def weights(config: Config) -> Weights:
    """Random fp32 weights of `config` as the fixture gives it."""
    return tiny.random_weights(config)
