"""The check before a kernel's first use: right kernels pass, wrong ones give way to their references."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from spark25_mlx.custom_kernels.add_rms_norm import add_rms_norm
from spark25_mlx.custom_kernels.backend import Kernel, forced, registered
from spark25_mlx.custom_kernels.decode_attention import Shape, bind_decode_attention, can_decode
from tests import metal_sim
from tests.kernels.backends import CACHE_BUFFERS, Backend, simulated
from tests.kernels.rounding import DTYPES, to_float64
from tests.metal_sim.planted import Planting

# What follows the dtype in the keys of a kernel's variants.
VARIANTS: dict[str, list[tuple[Any, ...]]] = {
    "add_rms_norm": [(None,), (mx.bfloat16,)],
    "geglu": [(False,), (True,)],
    "head_gate": [(64, "silu"), (256, "sigmoid")],
    "project_gate": [(64, "silu", True), (256, "sigmoid", False)],
    "qkv_rope": [(64, 16), (256, 256)],
    "qkv_rope_append": [(64, 16), (256, 256)],
    "decode_attention": [(256, 64, 4, None, "silu"), (64, 64, 3, 9, "sigmoid")],
    "decode_attention_final": [
        (256, 64, 4, None, "silu", 1, 16, 0, 4),
        (256, 64, 1, 9, "sigmoid", 2, 16, 0, 2),
        (64, 64, 3, 9, "sigmoid"),
    ],
    "decode_attention_quantised": [
        (256, 64, 4, None, "silu", 1, 8, 64),
        (64, 64, 3, None, "sigmoid", 1, 4, 32),
    ],
    "decode_attention_matrix": [
        (256, 64, 4, None, "silu", 1, 8, 64),
        (64, 64, 3, None, "sigmoid", 1, 4, 64),
    ],
    "decode_attention_turbo": [
        (256, 64, 4, None, "silu", 1, 4, 0),
        (64, 64, 3, None, "sigmoid", 1, 4, 0),
    ],
    "merge_gate_turbo": [(64, "silu"), (256, "sigmoid")],
    "merge_gate": [(64, "silu"), (256, "sigmoid")],
    "norm_qkv": [(16, 0)],
    "norm_qkv_quantised": [(8, 64), (4, 32)],
    "norm_geglu": [(16, 0)],
    "norm_geglu_quantised": [(8, 64), (4, 32)],
    "linear_add": [(16, 0)],
    "linear_add_quantised": [(8, 64), (4, 32)],
}
KEYS = [
    *(
        (name, (dtype, *variant))
        for name in VARIANTS
        for variant in VARIANTS[name]
        for dtype in DTYPES.values()
        if dtype != mx.float32 or name not in ("decode_attention_matrix", "decode_attention_turbo")
    ),
    *(("rope_table", (dims,)) for dims in (16, 256)),
]


def test_every_kernel_is_checked() -> None:
    assert {name for name, _ in KEYS} == set(registered())


@pytest.mark.parametrize(("name", "key"), KEYS, ids=str)
def test_right_kernels_pass(backend: Backend, name: str, key: tuple[Any, ...]) -> None:
    if backend.is_reference:
        pytest.skip("a check of kernels")
    with backend.writing():
        assert registered()[name].error(*key) <= 1


def test_order_of_stored_codes_is_checked() -> None:
    """The kernel sees its new rows in registers: only the check looks at what it has stored."""
    metal_sim.require_toolchain()
    planting = Planting(
        "/ 32 + w] = share.words[w]", "/ 32 + w] = share.words[w] << 16 | share.words[w] >> 16"
    )
    with forced("simulator with a bug", planting), metal_sim.options(writable=CACHE_BUFFERS):
        for bits in (8, 4):
            key = mx.bfloat16, 256, 64, 4, None, "sigmoid", 1, bits, 64
            for name in ("decode_attention_quantised", "decode_attention_matrix"):
                assert registered()[name].error(*key) > 1
    assert planting.planted


def test_wrong_kernel_gives_way() -> None:
    """One warning, and the reference's result from then on."""
    metal_sim.require_toolchain()
    inputs = mx.arange(64, dtype=mx.float32)[None], None, mx.ones(64)
    planting = Planting("total / float(H)", "total / float(H + 1)")
    with forced("simulator with a bug", planting):
        with pytest.warns(
            UserWarning, match=r"kernel add_rms_norm differs from its reference by [\d.]+ times"
        ):
            _, x = add_rms_norm(*inputs, eps=1e-6)
        assert registered()["add_rms_norm"].route().startswith("reference (differs")
        _, again = add_rms_norm(*inputs, eps=1e-6)
    assert planting.planted
    exact = to_float64(inputs[0]) / (to_float64(inputs[0]) ** 2).mean() ** 0.5
    for out in (x, again):
        assert abs(to_float64(out) - exact).max() < 1e-5


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_attention_of_a_window_is_checked_as_it_runs(batch: int) -> None:
    """How many threadgroups share a head's values is part of the text, and depends on the batch."""
    metal_sim.require_toolchain()
    seen = []

    def ready(kernel: Kernel, *key: Any) -> bool:
        seen.append((kernel.name, key))
        return True

    shape = Shape(mx.bfloat16, batch, 1, 16, 4, 256, 256, 512, "sigmoid")
    bound = []
    with simulated(), patch.object(Kernel, "ready", ready):
        assert can_decode(shape)
        with patch.object(
            Kernel, "bind", lambda kernel, **launch: bound.append(launch["constants"]["PARTS"])
        ):
            bind_decode_attention(shape, 1)
    assert bound == [{1: 4, 2: 4, 8: 1}[batch]]
    assert ("decode_attention_final", (*shape.variant, *bound)) in seen
