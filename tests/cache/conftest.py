"""What the cache tests share."""

from __future__ import annotations

from collections.abc import Iterator

import mlx_lm.models.cache as mlx_lm_cache
import pytest

from spark25_mlx.cache import CACHE_CLASSES
from tests.kernels.conftest import backend

__all__ = ["backend", "known_to_mlx_lm"]


@pytest.fixture(autouse=True)
def known_to_mlx_lm() -> Iterator[None]:
    """mlx-lm's load_prompt_cache finds the caches, as it does while the plugin is enabled."""
    with pytest.MonkeyPatch.context() as patch:
        for cls in CACHE_CLASSES:
            patch.setattr(mlx_lm_cache, cls.__name__, cls, raising=False)
        yield
