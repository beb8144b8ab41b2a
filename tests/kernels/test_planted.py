"""Every bug planted into a kernel is caught, and by what it should be; the kernels themselves are clean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from spark25_mlx.custom_kernels.backend import registered
from tests.kernels.planted import SUBJECTS, TABLE
from tests.metal_sim import Kind, MetalSimError, metal_kernel, options, require_toolchain
from tests.metal_sim.planted import NOTHING, Planted, Subject, assert_caught

# A correct kernel gives correct results under all of them.
CONDITIONS: list[dict[str, Any]] = [
    {"order": "forward"},
    {"order": "reverse"},
    {"order": "shuffle"},
    {"sum_order": "ascending"},
    {"sum_order": "butterfly-reversed"},
    {"round_grid": True},
    {"same_value_races": True},
    {"fma_contraction": True},
]
# Wide loads: their buffers must be whole arrays, which MLX aligns, or start at a multiple of 16 bytes.
LOADS_VECTORS = {
    name
    for name in registered()
    if name.startswith(("decode_attention", "merge_gate", "norm_qkv", "norm_geglu", "linear_add"))
}

subjects = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)


@pytest.fixture(autouse=True)
def toolchain() -> None:
    require_toolchain()


def test_every_kernel_is_a_subject() -> None:
    assert set(SUBJECTS) == set(registered())
    assert {row.subject for row in TABLE} == set(SUBJECTS)
    assert sum(row.expected != NOTHING for row in TABLE) >= 30


@subjects
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: "-".join(map(str, *c.items())))
def test_unchanged_kernel_passes(subject: Subject, condition: Mapping[str, Any]) -> None:
    with options(**condition):
        subject.run(metal_kernel)


@subjects
def test_alignment_that_kernels_need(subject: Subject) -> None:
    """One element is all that MLX promises of a slice."""
    with options(misaligned=True):
        if subject.name in LOADS_VECTORS:
            with pytest.raises(MetalSimError) as caught:
                subject.run(metal_kernel)
            assert caught.value.kinds == {Kind.MISALIGNED}
        else:
            subject.run(metal_kernel)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.subject}: {row.bug}")
def test_planted_bug_is_caught(row: Planted) -> None:
    assert_caught(SUBJECTS[row.subject], row)
