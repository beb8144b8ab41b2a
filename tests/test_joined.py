"""gate_proj and up_proj as one product: the same results, the same parameters, and never stale."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from spark25_mlx import model
from spark25_mlx.config import ModelArgs
from spark25_mlx.joined import JoinedLinear
from tests.tiny import tiny_config


@pytest.fixture
def mlp(monkeypatch: pytest.MonkeyPatch) -> model.MLP:
    """An MLP whose layers are joined; `mlp.calls` counts the joined products."""
    mlp = model.MLP(ModelArgs.from_dict(tiny_config(hidden_size=64, intermediate_size=96)))
    mlp.eval()
    mlp.join()
    calls: list[int] = []
    original = JoinedLinear.__call__

    def counted(self: JoinedLinear, x: mx.array) -> mx.array:
        calls.append(1)
        return original(self, x)

    monkeypatch.setattr(JoinedLinear, "__call__", counted)
    mlp.calls = calls
    return mlp


def separate(mlp: model.MLP, x: mx.array) -> mx.array:
    return mlp.down_proj(model.geglu(mlp.gate_proj(x), mlp.up_proj(x)))


def inputs(mlp: model.MLP) -> mx.array:
    return mx.random.normal((2, 3, mlp.down_proj.weight.shape[0]), key=mx.random.key(0))


def same(a: mx.array, b: mx.array) -> None:
    np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-6)


def test_joined_equals_separate(mlp: model.MLP) -> None:
    x = inputs(mlp)
    same(mlp(x), separate(mlp, x))
    assert mlp.calls


def test_parameters_are_as_they_were() -> None:
    args = ModelArgs.from_dict(tiny_config(hidden_size=64, intermediate_size=96))
    mlp = model.MLP(args)
    before = dict(tree_flatten(mlp.parameters()))
    mlp.join()
    after = dict(tree_flatten(mlp.parameters()))
    assert after.keys() == before.keys() == {f"{name}_proj.weight" for name in ("gate", "up", "down")}
    for name, value in before.items():
        assert mx.array_equal(value, after[name])


def quantise(mlp: model.MLP) -> None:
    nn.quantize(mlp, group_size=32, bits=8)


def adapt(mlp: model.MLP) -> None:
    mlp.gate_proj = LoRALinear.from_base(mlp.gate_proj)
    mlp.gate_proj.lora_b = mx.ones_like(mlp.gate_proj.lora_b)


def load(mlp: model.MLP) -> None:
    mlp.load_weights([("up_proj.weight", 2 * mlp.up_proj.weight)], strict=False)


def swap(mlp: model.MLP) -> None:
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


@pytest.mark.parametrize("change", [quantise, adapt, load, swap])
def test_a_change_ends_the_joining(mlp: model.MLP, change: Callable[[model.MLP], None]) -> None:
    x = inputs(mlp)
    before = mlp(x)
    mlp.calls.clear()
    change(mlp)
    after = mlp(x)
    assert not mlp.calls
    same(after, separate(mlp, x))
    assert not np.allclose(np.array(before), np.array(after), rtol=1e-6, atol=0)


def test_training_uses_the_layers_themselves(mlp: model.MLP) -> None:
    mlp.train()
    mlp(inputs(mlp))
    assert not mlp.calls


def test_quantised_alike_are_joined(mlp: model.MLP) -> None:
    nn.quantize(mlp, group_size=32, bits=4)
    mlp.join()
    mlp.calls.clear()
    x = inputs(mlp)
    same(mlp(x), separate(mlp, x))
    assert mlp.calls


def test_unlike_layers_are_not_joined() -> None:
    plain, quantised = (
        nn.Linear(64, 32, bias=False),
        nn.QuantizedLinear(64, 32, bias=False, group_size=32, bits=4),
    )
    coarse = nn.QuantizedLinear(64, 32, bias=False, group_size=64, bits=4)
    biased = nn.Linear(64, 32)
    for pair in ((plain, quantised), (quantised, coarse), (plain, biased)):
        assert JoinedLinear.of(*pair) is None
