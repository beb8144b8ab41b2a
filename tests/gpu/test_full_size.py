"""The 4B model's shapes on this machine's GPU, with random weights: what the kernels change and what not."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from spark25_mlx.config import ModelArgs
from spark25_mlx.custom_kernels import backend
from spark25_mlx.model import Model
from spark25_mlx.plugin import native_module
from tests import reference
from tests.tiny import PUBLISHED, Config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(backend.backend_name() == backend.REFERENCE, reason="needs a GPU"),
]

GIB = 2**30
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
# Past one wrap of the window of 512.
PROMPT = 600


def shapes(needed: int) -> Config:
    """The 4B, or its first eight layers where the whole does not fit."""
    config = PUBLISHED["4B"][0]
    return config if needed < MEMORY else config | {"num_hidden_layers": 8, "layer_types": None}


def random_model(config: Config, dtype: mx.Dtype) -> Model:
    """Weights that keep activations of order one, made on the GPU.

    The embedding is small, or a tied head would only repeat the last token.
    """
    model = Model(ModelArgs.from_dict({k: v for k, v in config.items() if v is not None}))
    keys = iter(mx.random.split(mx.random.key(1), 1000))
    weights = []
    for name, parameter in tree_flatten(model.parameters()):
        value = mx.random.normal(parameter.shape, key=next(keys))
        if parameter.ndim == 1:
            value = 1 + 0.1 * value
        else:
            value *= 0.02 if "embedding" in name else parameter.shape[-1] ** -0.5
        weights.append((name, value.astype(dtype)))
    model.load_weights(weights)
    model.eval()
    mx.eval(model.parameters())
    return model


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    gc.collect()
    mx.clear_cache()


def prompt(config: Config) -> mx.array:
    return mx.random.randint(0, config["vocab_size"], (1, PROMPT), key=mx.random.key(2))


def greedy(model: Model, tokens: mx.array, n: int) -> list[int]:
    cache = model.make_cache()
    token = mx.argmax(model(tokens, cache=cache)[:, -1:], axis=-1)
    out = []
    for _ in range(n):
        following = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
        mx.async_eval(following)
        out.append(token.item())
        token = following
    return out


def test_greedy_tokens_with_and_without_kernels() -> None:
    config = shapes(40 * GIB)
    model = random_model(config, mx.float32)
    tokens = prompt(config)
    with_kernels = greedy(model, tokens, 500)
    with backend.without(*backend.registered(), "fused_linear"):
        without_kernels = greedy(model, tokens, 500)
    assert len(set(with_kernels)) > 10
    assert with_kernels == without_kernels


class FromModel(Mapping[str, np.ndarray]):
    """A model's tensors in numpy, one at a time."""

    def __init__(self, model: Model) -> None:
        self._parameters = dict(tree_flatten(model.parameters()))

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array(self._parameters[name].astype(mx.float32))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def test_bf16_is_nearer_to_float64_than_mlx_lm() -> None:
    """Prefill and eight decoded tokens."""
    config = shapes(60 * GIB)
    model = random_model(config, mx.bfloat16)
    native = native_module()
    other = native.Model(native.ModelArgs.from_dict(config))
    other.load_weights(tree_flatten(model.parameters()))
    other.eval()
    tokens = prompt(config)

    def logits(of: Model) -> np.ndarray:
        cache = of.make_cache()
        outputs = [of(tokens[:, : PROMPT - 8], cache=cache)[:, -1:]]
        outputs += [of(tokens[:, i : i + 1], cache=cache) for i in range(PROMPT - 8, PROMPT)]
        return np.array(mx.concatenate(outputs, axis=1).astype(mx.float32)).astype(np.float64)

    exact = reference.forward(FromModel(model), config, np.array(tokens))[:, PROMPT - 9 :]
    ours, theirs = (np.sqrt(np.mean((logits(of) - exact) ** 2) / np.mean(exact**2)) for of in (model, other))
    layers = config["num_hidden_layers"]
    print(f"bf16, {layers} layers, relative rms to float64: ours {ours:.3e}, mlx-lm {theirs:.3e}")
    assert ours < theirs
