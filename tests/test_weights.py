"""Checkpoints into the model: names, missing and foreign tensors, damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import utils

from spark25_mlx import plugin
from spark25_mlx.config import ModelArgs
from spark25_mlx.model import Model
from spark25_mlx.weights import WeightsError, check, rename
from tests import tiny
from tests.tiny import Config, Weights

Save = Callable[..., Path]

ATTENTION = "model.layers.0.self_attn"


@pytest.fixture
def save(tmp_path: Path, config: Config) -> Save:
    """Writes a checkpoint folder: `save(weights, config changes)`."""

    def write(weights: dict[str, Any], **changes: Any) -> Path:
        kept = {key: value for key, value in (config | changes).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        arrays = {name: mx.array(value) for name, value in weights.items()}
        mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
        return tmp_path

    return write


@pytest.fixture(autouse=True)
def plugin_enabled() -> Iterator[None]:
    """`load_model` finds this package's model, the way a user's mlx-lm does."""
    assert plugin.enable()
    yield
    plugin.disable()


def refusal(folder: Path) -> str:
    """The one-line message with which mlx-lm's loader refuses a folder."""
    with pytest.raises((ValueError, RuntimeError, OSError)) as caught:
        utils.load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def arrays(*names: str) -> dict[str, mx.array]:
    """Distinct one-element tensors."""
    return {name: mx.array([float(i)]) for i, name in enumerate(names)}


# Names


@pytest.mark.parametrize("suffix", ["weight", "scales", "biases"])
@pytest.mark.parametrize(
    ("third_party", "published"),
    [
        ("model.embed_tokens", "model.embedding"),
        (f"{ATTENTION}.o_proj", f"{ATTENTION}.out_proj"),
        ("model.layers.31.self_attn.o_proj", "model.layers.31.self_attn.out_proj"),
    ],
)
def test_third_party_name(third_party: str, published: str, suffix: str) -> None:
    renamed = rename(arrays(f"{third_party}.{suffix}"))
    assert renamed.keys() == {f"{published}.{suffix}"}


def test_published_names_stay(config: Config) -> None:
    names = list(tiny.parameter_shapes(config))
    given = arrays(*names)
    assert {name: value.item() for name, value in rename(given).items()} == {
        name: value.item() for name, value in given.items()
    }


def test_names_that_only_contain_a_third_party_name_stay() -> None:
    names = {"model.embed_tokens_extra.weight", "model.my_o_proj.weight", "proto_proj.weight"}
    assert rename(arrays(*names)).keys() == names


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_emb.inv_freq"],
)
def test_rotary_frequencies_are_dropped(name: str) -> None:
    assert rename(arrays(name, "model.norm.weight")).keys() == {"model.norm.weight"}


@pytest.mark.parametrize("order", [1, -1])
def test_tensor_under_both_names(order: int) -> None:
    names = ["model.embed_tokens.weight", "model.embedding.weight"][::order]
    with pytest.raises(
        WeightsError, match=r"embed_tokens.weight and model.embedding.weight are the same tensor"
    ):
        rename(arrays(*names))


# Names and shapes against the model


def test_check_accepts_equal_names_and_shapes() -> None:
    check(arrays("a", "b"), arrays("b", "a"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a", "b"], "checkpoint: 1 tensor is missing: c"),
        (["c"], "checkpoint: 2 tensors are missing: a, b"),
        (["a", "b", "c", "x"], "checkpoint: 1 tensor does not belong to this model: x"),
        (["a", "b", "c", *"zyxwv"], "checkpoint: 5 tensors do not belong to this model: v, w, x and 2 more"),
    ],
)
def test_check_names_tensors(given: list[str], message: str) -> None:
    with pytest.raises(WeightsError) as caught:
        check(arrays(*given), arrays("a", "b", "c"))
    assert str(caught.value) == message


def test_check_names_shapes() -> None:
    with pytest.raises(WeightsError) as caught:
        check({"a": mx.zeros((2, 3)), "b": mx.zeros(1)}, {"a": mx.zeros((3, 2)), "b": mx.zeros(1)})
    assert str(caught.value) == "checkpoint: a has shape [2, 3], the config asks for [3, 2]"


def test_load_weights_that_is_not_strict_takes_what_fits(config: Config, weights: Weights) -> None:
    """What mlx-lm's adapters rely on: part of the tensors, by name."""
    model = tiny.build(config, weights)
    model.load_weights([("model.norm.weight", mx.zeros(48))], strict=False)
    assert not mx.any(model.model.norm.weight).item()
    assert mx.any(model.model.embedding.weight).item()


# Through mlx-lm's loader


def assert_loads_as(folder: Path, config: Config, weights: Weights) -> Any:
    """The folder loads, as this package's model, with the logits of these weights."""
    model, _ = utils.load_model(folder)
    assert type(model) is Model
    tokens = tiny.random_tokens(config, 20)
    wanted = tiny.logits_of(tiny.build(config, weights), tokens)
    np.testing.assert_array_equal(tiny.logits_of(model, tokens), wanted)
    return model


def test_published_checkpoint(save: Save, config: Config, weights: Weights) -> None:
    assert_loads_as(save(weights), config, weights)


def test_third_party_checkpoint(save: Save, config: Config, weights: Weights) -> None:
    """`embed_tokens`, `o_proj`, stored frequencies and a redundant head, as found in the wild."""
    renamed = {
        name.replace("embedding", "embed_tokens").replace("out_proj", "o_proj"): value
        for name, value in weights.items()
    }
    renamed["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    renamed["lm_head.weight"] = np.zeros_like(weights["model.embedding.weight"])
    assert_loads_as(save(renamed), config, weights)


@pytest.mark.parametrize("tied", [False, None], ids=["config_says_untied", "config_does_not_say"])
def test_untied_checkpoint(save: Save, config: Config, tied: bool | None) -> None:
    untied = config | {"tie_word_embeddings": False}
    weights = tiny.random_weights(untied)
    model = assert_loads_as(save(weights, tie_word_embeddings=tied), untied, weights)
    assert "lm_head" in model


def test_tied_checkpoint_whose_config_does_not_say(save: Save, config: Config, weights: Weights) -> None:
    model = assert_loads_as(save(weights, tie_word_embeddings=None), config, weights)
    assert "lm_head" not in model


@pytest.mark.parametrize("tied", [True, None], ids=["tied", "untied_by_the_checkpoint"])
def test_quantized_third_party_checkpoint(save: Save, config: Config, tied: bool | None) -> None:
    """Scales and biases follow their renamed weights; the gates stay unquantised."""
    config |= {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": bool(tied)}
    quantization = {"group_size": 32, "bits": 4}
    model = tiny.build(config, tiny.random_weights(config))
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized") and model.quant_predicate(path, module)
        ),
    )
    renamed = {
        name.replace("embedding", "embed_tokens").replace("out_proj", "o_proj"): value
        for name, value in tiny.flat(model.parameters()).items()
    }
    assert "model.embed_tokens.scales" in renamed
    assert f"{ATTENTION}.o_proj.biases" in renamed
    assert f"{ATTENTION}.g_proj.scales" not in renamed
    changes = config | {"tie_word_embeddings": tied, "quantization": quantization}
    loaded, _ = utils.load_model(save(renamed, **changes))
    tokens = tiny.random_tokens(config, 20)
    np.testing.assert_array_equal(tiny.logits_of(loaded, tokens), tiny.logits_of(model, tokens))
    assert isinstance(loaded.layers[0].self_attn.q_k_v_proj, nn.QuantizedLinear)
    assert isinstance(loaded.layers[0].self_attn.g_proj, nn.Linear)
    assert isinstance(loaded.model.embedding, nn.QuantizedEmbedding)


@pytest.mark.parametrize(
    "name",
    [
        "model.embedding.weight",
        "model.norm.weight",
        f"{ATTENTION}.g_proj.weight",
        f"{ATTENTION}.out_proj.weight",
    ],
)
def test_missing_tensor(save: Save, weights: Weights, name: str) -> None:
    del weights[name]
    assert refusal(save(weights)) == f"checkpoint: 1 tensor is missing: {name}"


def test_untied_config_without_a_head(save: Save, weights: Weights) -> None:
    folder = save(weights, tie_word_embeddings=False)
    assert refusal(folder) == "checkpoint: 1 tensor is missing: lm_head.weight"


@pytest.mark.parametrize(
    "name", ["model.layers.4.mlp.up_proj.weight", f"{ATTENTION}.q_k_v_proj.bias", "visual.weight"]
)
def test_extra_tensor(save: Save, weights: Weights, name: str) -> None:
    folder = save(weights | {name: np.ones(3, np.float32)})
    assert refusal(folder) == f"checkpoint: 1 tensor does not belong to this model: {name}"


def test_misshaped_tensor(save: Save, weights: Weights) -> None:
    name = f"{ATTENTION}.q_k_v_proj.weight"
    weights[name] = weights[name].T
    message = refusal(save(weights))
    assert message == f"checkpoint: {name} has shape [48, 192], the config asks for [192, 48]"


def test_checkpoint_of_another_shape(save: Save, weights: Weights) -> None:
    """All tensors differ: the message stays one line and names a few."""
    message = refusal(save(weights, hidden_size=64))
    assert "model.embedding.weight has shape [97, 48], the config asks for [97, 64]" in message
    assert len(message) < 500


def test_missing_shard(save: Save, weights: Weights) -> None:
    folder = save({name: value for name, value in weights.items() if "layers.3" not in name})
    assert refusal(folder).startswith("checkpoint: 8 tensors are missing: model.layers.3.")


def test_bad_config_key(save: Save, weights: Weights) -> None:
    assert refusal(save(weights, num_key_value_heads=3)).startswith("config.json: num_key_value_heads is 3;")


def test_no_weights_file(save: Save, weights: Weights) -> None:
    folder = save(weights)
    (folder / "model.safetensors").unlink()
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 5000, -1], ids=lambda n: f"first_{n}_bytes")
def test_truncated_file(save: Save, weights: Weights, kept: int) -> None:
    """An interrupted download: the message names the file."""
    folder = save(weights)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in refusal(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"<!DOCTYPE html><html>404</html>" * 10,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        (50).to_bytes(8, "little") + b"x" * 50,
        (2).to_bytes(8, "little") + b"[]",
    ],
    ids=["html", "git_lfs_pointer", "header_not_json", "header_not_an_object"],
)
def test_not_a_safetensors_file(save: Save, weights: Weights, content: bytes) -> None:
    folder = save(weights)
    (folder / "model.safetensors").write_bytes(content)
    assert str(folder / "model.safetensors") in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\ufeff{}"])
def test_broken_config(save: Save, weights: Weights, text: str) -> None:
    folder = save(weights)
    (folder / "config.json").write_text(text)
    assert refusal(folder).startswith(f"{folder / 'config.json'} is ")


def test_config_in_another_encoding(save: Save, weights: Weights) -> None:
    folder = save(weights)
    (folder / "config.json").write_bytes(b"\xff\xfe{\x00}\x00")
    assert refusal(folder).startswith(f"{folder / 'config.json'} is not text")


def test_every_shard_is_looked_at(save: Save, weights: Weights) -> None:
    folder = save(weights)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(whole)
    (folder / "model-00002-of-00002.safetensors").write_bytes(whole[:-7])
    message = refusal(folder)
    assert message == (
        f"{folder / 'model-00002-of-00002.safetensors'} is cut off: it has {len(whole) - 7} bytes of "
        f"{len(whole)}; download it or make it again"
    )


def test_files_of_other_models_are_left_to_mlx_lm(save: Save, weights: Weights) -> None:
    folder = save(weights, model_type="llama")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(RuntimeError) as caught:
        utils.load_model(folder)
    assert "download it" not in str(caught.value)


def test_equal_shapes_are_not_confused(save: Save, config: Config, weights: Weights) -> None:
    """Two matrices of one shape, swapped in the file: only the logits can tell."""
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    swapped = weights | {gate: weights[up], up: weights[gate]}
    model, _ = utils.load_model(save(swapped))
    tokens = tiny.random_tokens(config, 20)
    wanted = tiny.logits_of(tiny.build(config, weights), tokens)
    assert np.abs(tiny.logits_of(model, tokens) - wanted).max() > 0.1


def test_weights_in_other_dtypes(save: Save, config: Config, weights: Weights) -> None:
    """The tensors' dtype is the model's: activations and logits follow it."""
    half = {name: mx.array(value).astype(mx.bfloat16) for name, value in weights.items()}
    model, _ = utils.load_model(save(half))
    assert model(mx.array([[1, 2]])).dtype == mx.bfloat16


def test_model_args_come_from_the_file(save: Save, config: Config, weights: Weights) -> None:
    model, _ = utils.load_model(save(weights))
    assert model.args == ModelArgs.from_dict(config)
