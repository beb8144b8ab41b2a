"""The model as mlx-lm drives it: prompts that cannot be, caches, what gets quantised."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from spark25_mlx.config import ModelArgs
from spark25_mlx.model import Model
from tests import tiny
from tests.tiny import Config, F, S, Weights

VOCAB = 97


@pytest.fixture
def model(config: Config, weights: Weights) -> Model:
    return tiny.build(config, weights)


def call(model: Model, ids: list[int]) -> None:
    """The model itself."""
    mx.eval(model(mx.array([ids], dtype=mx.int32)))


def call_with_cache(model: Model, ids: list[int]) -> None:
    """The model with an empty cache."""
    mx.eval(model(mx.array([ids], dtype=mx.int32), model.make_cache()))


def generate(model: Model, ids: list[int]) -> None:
    """mlx-lm's loop, which gives the last id in a call of its own."""
    for _ in generate_step(mx.array(ids, dtype=mx.int32), model, max_tokens=2):
        pass


@pytest.mark.parametrize("run", [call, call_with_cache, generate])
@pytest.mark.parametrize("bad", [VOCAB, -1])
@pytest.mark.parametrize(("length", "place"), [(1, 0), (3, 0), (3, 1), (3, 2), (30, 29)])
def test_id_out_of_range(
    model: Model, run: Callable[[Model, list[int]], None], bad: int, length: int, place: int
) -> None:
    ids = [5] * length
    ids[place] = bad
    with pytest.raises(ValueError) as caught:
        run(model, ids)
    assert str(caught.value) == f"token id {bad} is out of range; the vocabulary has {VOCAB} ids"


@pytest.mark.parametrize("bad", [2**31 - 1, -(2**31)])
def test_id_far_out_of_range(model: Model, bad: int) -> None:
    """Read without the check, these crash the process."""
    with pytest.raises(ValueError, match=f"token id {bad} is out of range"):
        call_with_cache(model, [1, bad, 2])


def test_id_out_of_range_after_a_reused_prefix(model: Model) -> None:
    cache = model.make_cache()
    mx.eval(model(mx.array([[1, 2, 3]]), cache))
    with pytest.raises(ValueError, match=f"token id {VOCAB} is out of range"):
        mx.eval(model(mx.array([[VOCAB, 1, 2, 3]]), cache))


@pytest.mark.parametrize("run", [call, call_with_cache, generate])
@pytest.mark.parametrize("ids", [[0], [VOCAB - 1], [0, VOCAB - 1] * 10])
def test_first_and_last_id(model: Model, run: Callable[[Model, list[int]], None], ids: list[int]) -> None:
    run(model, ids)


@pytest.mark.parametrize("run", [call, call_with_cache, generate])
def test_empty_prompt(model: Model, run: Callable[[Model, list[int]], None]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        run(model, [])


@pytest.mark.parametrize("dtype", [mx.uint32, mx.int32, mx.int64, mx.uint16])
def test_integer_dtypes_of_ids(model: Model, dtype: mx.Dtype) -> None:
    ids = mx.array([[3, 1, 4, 1, 5]])
    np.testing.assert_array_equal(np.array(model(ids.astype(dtype))), np.array(model(ids)))


def test_one_cache_a_layer(config: Config, weights: Weights) -> None:
    """All positions are counted everywhere; sliding layers keep a window of them, full layers all."""
    config |= {"layer_types": [F, S, S, F], "sliding_window": 5}
    model = tiny.build(config, weights)
    caches = model.make_cache()
    for piece in np.split(tiny.random_tokens(config, 600), 12, axis=1):
        mx.eval(model(mx.array(piece), caches))
    assert [cache.offset for cache in caches] == [600] * 4
    row = 2 * 32 * 4  # bytes of a key and a value
    assert all(caches[i].nbytes >= 600 * row for i in (0, 3))
    assert all(caches[i].nbytes <= 300 * row for i in (1, 2))


def test_caches_are_not_shared(model: Model) -> None:
    first, second = model.make_cache(), model.make_cache()
    model(mx.array([[1, 2, 3]]), first)
    assert [cache.offset for cache in first] == [3] * 4
    assert [cache.offset for cache in second] == [0] * 4


def test_gates_are_not_quantized(model: Model) -> None:
    named = dict(model.named_modules())
    chosen = {
        path
        for path, module in named.items()
        if hasattr(module, "to_quantized") and model.quant_predicate(path, module)
    }
    linear = {path for path, module in named.items() if isinstance(module, nn.Linear | nn.Embedding)}
    assert linear - chosen == {f"model.layers.{i}.self_attn.g_proj" for i in range(4)}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_logits_have_the_dtype_of_the_weights(config: Config, weights: Weights, dtype: mx.Dtype) -> None:
    model = tiny.build(config, weights, dtype)
    logits = model(mx.array([[1, 2, 3], [4, 5, 6]]))
    assert logits.dtype == dtype
    assert logits.shape == (2, 3, VOCAB)


def test_layers_and_model_type(config: Config) -> None:
    """What mlx-lm reads from a model."""
    model = Model(ModelArgs.from_dict(config))
    assert model.model_type == "spark2_5"
    assert [layer.layer_type for layer in model.layers] == config["layer_types"]
