"""Training: gradients against float64, optimiser steps, and mlx-lm's ways to run them."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx import optimizers
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

from spark25_mlx.model import DecoderLayer, Model
from tests import reference, tiny
from tests.tiny import Config, F, S, Weights

LENGTH = 24
# One step of the central difference; the float64 reference leaves an error near 1e-9.
STEP = 1e-5

CONFIGS = {
    "base": {},
    "silu_biases_untied": {
        "gate_attn_act_mode": "silu",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
}


def small(**changes: Any) -> Config:
    """Two layers, one of each class, and a window that the prompt passes."""
    shape = {"num_hidden_layers": 2, "layer_types": [S, F], "sliding_window": 7, "hidden_size": 24}
    return tiny.tiny_config(**(shape | {"intermediate_size": 32, "vocab_size": 31} | changes))


def batch_of(config: Config) -> np.ndarray:
    """Two prompts [2, LENGTH]."""
    return tiny.random_tokens(config, LENGTH, batch=2)


def training_model(config: Config, weights: Weights, dtype: mx.Dtype = mx.float32) -> Model:
    model = tiny.build(config, weights, dtype)
    model.train()
    return model


def loss_of(model: Model, tokens: mx.array) -> mx.array:
    """Mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")


def reference_loss(weights: Weights, config: Config, tokens: np.ndarray) -> float:
    """`loss_of` in float64."""
    logits = reference.forward(weights, config, tokens[:, :-1])
    logits = logits - logits.max(-1, keepdims=True)
    picked = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return float((np.log(np.exp(logits).sum(-1)) - picked).mean())


def gradients(model: Model, tokens: mx.array) -> tuple[float, Weights]:
    loss, gradient = nn.value_and_grad(model, loss_of)(model, tokens)
    return float(np.array(loss)), {name: np.array(g) for name, g in tiny.flat(gradient).items()}


def assert_same_gradients(actual: Weights, wanted: Weights, tolerance: float) -> None:
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        error = np.linalg.norm(actual[name] - value) / np.linalg.norm(value)
        assert error <= tolerance, f"gradient of {name}: relative error {error:.1e}"


@pytest.mark.parametrize("variant", CONFIGS)
def test_gradients_match_finite_differences(variant: str) -> None:
    """Every tensor, along its gradient and a random direction, against differences of the float64 loss."""
    config = small(**CONFIGS[variant])
    weights, tokens = tiny.random_weights(config), batch_of(config)
    loss, gradient = gradients(training_model(config, weights), mx.array(tokens))
    assert loss == pytest.approx(reference_loss(weights, config, tokens), rel=1e-5)
    assert gradient.keys() == weights.keys()
    rng = np.random.default_rng(3)
    for name, g in gradient.items():
        assert np.isfinite(g).all(), name
        norm = np.linalg.norm(g.astype(np.float64))
        assert norm > 1e-4, f"{name} has hardly any gradient"
        for direction in (g.astype(np.float64), rng.standard_normal(g.shape)):
            direction = direction / np.linalg.norm(direction)
            sides = [
                reference_loss(weights | {name: weights[name] + sign * STEP * direction}, config, tokens)
                for sign in (1, -1)
            ]
            wanted = (sides[0] - sides[1]) / (2 * STEP)
            assert abs((g * direction).sum() - wanted) <= 1e-4 * norm, name


def test_gradients_do_not_depend_on_the_mode() -> None:
    """Nothing is dropped out: train and eval mode compute the same function."""
    config = small()
    weights, tokens = tiny.random_weights(config), batch_of(config)
    model = training_model(config, weights)
    trained = np.array(model(mx.array(tokens)))
    model.eval()
    np.testing.assert_array_equal(trained, np.array(model(mx.array(tokens))))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["fp32", "bf16"])
def test_steps_lower_the_loss(dtype: mx.Dtype) -> None:
    config = small()
    tokens = mx.array(batch_of(config))
    model = training_model(config, tiny.random_weights(config), dtype)
    optimizer = optimizers.SGD(learning_rate=0.02)
    losses = []
    for _ in range(4):
        loss, gradient = nn.value_and_grad(model, loss_of)(model, tokens)
        optimizer.update(model, gradient)
        losses.append(float(np.array(loss)))
    assert all(after < before for before, after in pairwise(losses)), losses


def test_compiled_step_is_the_plain_step() -> None:
    """The step as mlx-lm's trainer compiles it: loss and updated weights over several calls."""
    # One layer: on a CPU each fused kernel is compiled by a C++ compiler.
    config = small(num_hidden_layers=1, layer_types=[S])
    weights, tokens = tiny.random_weights(config), mx.array(batch_of(config))

    def run(compiled: bool) -> tuple[list[float], Weights]:
        model = training_model(config, weights)
        optimizer = optimizers.SGD(learning_rate=0.02)
        state = [model.state, optimizer.state, mx.random.state]

        def step(tokens: mx.array) -> mx.array:
            loss, gradient = nn.value_and_grad(model, loss_of)(model, tokens)
            optimizer.update(model, gradient)
            return loss

        call = partial(mx.compile, inputs=state, outputs=state)(step) if compiled else step
        losses = []
        for _ in range(3):
            losses.append(float(np.array(call(tokens))))
            mx.eval(state)
        return losses, {name: np.array(value) for name, value in tiny.flat(model.parameters()).items()}

    plain, compiled = run(False), run(True)
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5)
    assert compiled[0][0] > compiled[0][-1]
    assert_same_gradients(compiled[1], plain[1], 1e-5)


def test_checkpointed_layers_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's --grad-checkpoint, which recomputes each layer in the backward pass."""
    config = small()
    weights, tokens = tiny.random_weights(config), mx.array(batch_of(config))
    loss, wanted = gradients(training_model(config, weights), tokens)
    # grad_checkpoint replaces the class's __call__ for good; this puts it back after the test.
    monkeypatch.setattr(DecoderLayer, "__call__", plain_call := DecoderLayer.__call__)
    model = training_model(config, weights)
    grad_checkpoint(model.layers[0])
    assert DecoderLayer.__call__ is not plain_call
    checkpointed_loss, checkpointed = gradients(model, tokens)
    assert checkpointed_loss == pytest.approx(loss, rel=1e-6)
    assert_same_gradients(checkpointed, wanted, 1e-5)


def test_lora_trains_the_fused_projection() -> None:
    """mlx-lm's LoRA on the family's own target names: adapters get gradients, base weights do not."""
    config = small()
    tokens = mx.array(batch_of(config))
    model = training_model(config, tiny.random_weights(config))
    model.freeze()
    keys = {"self_attn.q_k_v_proj", "self_attn.out_proj"}
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": keys})
    _, gradient = nn.value_and_grad(model, loss_of)(model, tokens)
    names = tiny.flat(gradient)
    targets = {f"model.layers.{i}.{key}" for i in range(2) for key in keys}
    assert names.keys() == {f"{target}.{lora}" for target in targets for lora in ("lora_a", "lora_b")}
    # lora_b starts at zero, so at first only it has a gradient.
    for target in targets:
        assert np.linalg.norm(np.array(names[f"{target}.lora_b"])) > 1e-4
