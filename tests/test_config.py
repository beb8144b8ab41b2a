"""Reading `config.json`: what is accepted, what is refused and in which words."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark25_mlx import model
from spark25_mlx.config import FULL, SLIDING, ConfigError, ModelArgs, RopeArgs
from spark25_mlx.model import Model
from tests import reference, tiny
from tests.tiny import Config, F, S

POSITIVE_INTEGERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "sliding_window",
)
BOOLEANS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "headwise_attn_output_gate")
# JSON has integers beyond every float.
HUGE = pytest.param(10**400, id="10**400")


def refusal(config: Config) -> str:
    """The message of the ConfigError that a config raises, which must be one line about config.json."""
    with pytest.raises(ConfigError) as caught:
        ModelArgs.from_dict(config)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("config.json: ")
    return message


def set_rope(config: Config, kind: str, **changes: Any) -> None:
    """Change keys of a layer class's rotary parameters; None removes the key."""
    entry = config["rope_parameters"][kind] | changes
    config["rope_parameters"][kind] = {key: value for key, value in entry.items() if value is not None}


def test_every_key_is_read(config: Config) -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "gate_attn_act_mode": "silu", "rms_norm_eps": 1e-5}
    args = ModelArgs.from_dict(config | changes | {"tie_word_embeddings": False, "model_type": "sparkx2_5"})
    assert args == ModelArgs(
        model_type="sparkx2_5",
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=97,
        sliding_window=64,
        layer_types=(SLIDING, SLIDING, SLIDING, FULL),
        rope={FULL: RopeArgs(5e6, 8), SLIDING: RopeArgs(1e4, 32)},
        rms_norm_eps=1e-5,
        attention_bias=True,
        mlp_bias=True,
        gate_attn_act_mode="silu",
        tie_word_embeddings=False,
    )
    assert (args.q_size, args.kv_size) == (128, 32)


def test_defaults(config: Config) -> None:
    """Keys that a re-saved config may lack; what they mean when they are there is tested above."""
    required = {*POSITIVE_INTEGERS, "model_type", "rope_parameters"}
    args = ModelArgs.from_dict({key: config[key] for key in required} | {"num_hidden_layers": 6})
    assert args.layer_types == (S, S, S, F, S, S)
    assert args.rms_norm_eps == 1e-6
    assert (args.attention_bias, args.mlp_bias) == (False, False)
    assert args.gate_attn_act_mode == "sigmoid"
    assert args.tie_word_embeddings is None


def test_unknown_keys_are_ignored(config: Config) -> None:
    extra = {"initializer_range": 0.02, "max_position_embeddings": 1048576, "auto_map": {"AutoConfig": "x.y"}}
    assert ModelArgs.from_dict(config | extra) == ModelArgs.from_dict(config)


def test_config_is_not_changed(config: Config) -> None:
    ModelArgs.from_dict(config)
    assert config == tiny.tiny_config()


def test_rope_parameters_of_a_class_without_layers_are_not_read(config: Config) -> None:
    config["layer_types"] = [S] * 4
    del config["rope_parameters"][F]
    assert set(ModelArgs.from_dict(config).rope) == {S}


@pytest.mark.parametrize("name", tiny.PUBLISHED)
def test_published_parameter_count(name: str) -> None:
    """Counted on the lazy parameters: nothing of the size of the model is allocated."""
    config, parameters = tiny.PUBLISHED[name]
    start = time.perf_counter()
    spark = Model(ModelArgs.from_dict(config))
    counted = {name: value.shape for name, value in tiny.flat(spark.parameters()).items()}
    assert time.perf_counter() - start < 5
    assert counted == tiny.parameter_shapes(config)
    assert sum(math.prod(shape) for shape in counted.values()) == parameters


def test_published_4b_has_290_tensors() -> None:
    spark = Model(ModelArgs.from_dict(tiny.PUBLISHED["4B"][0]))
    assert len(tiny.flat(spark.parameters())) == 290


@pytest.mark.parametrize(("kind", "theta", "dims"), [(FULL, 5e6, 64), (SLIDING, 1e4, 256)])
def test_rope_of_each_layer_class(kind: str, theta: float, dims: int) -> None:
    """A model that swaps the classes' frequencies, or divides by head_dim, fails here by name."""
    args = ModelArgs.from_dict(tiny.PUBLISHED["4B"][0])
    assert args.rope[kind] == RopeArgs(theta, dims)
    frequencies = np.array(model.rope_for(args, kind)).astype(np.float64) * 2.0**-64 * 2 * math.pi
    np.testing.assert_allclose(frequencies, reference.inverse_frequencies(theta, dims), rtol=1e-12)
    assert frequencies[1] == pytest.approx(theta ** (-2 / dims), rel=1e-6)


def test_swapped_rope_classes_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    original, other = model.rope_for, {FULL: SLIDING, SLIDING: FULL}
    monkeypatch.setattr(model, "rope_for", lambda args, kind: original(args, other[kind]))
    for kind, theta, dims in ((FULL, 5e6, 64), (SLIDING, 1e4, 256)):
        with pytest.raises(AssertionError):
            test_rope_of_each_layer_class(kind, theta, dims)


# Refusals


@pytest.mark.parametrize("key", POSITIVE_INTEGERS)
@pytest.mark.parametrize("value", [0, -1, "4", 4.0, True, math.nan, [4]])
def test_not_a_positive_integer(config: Config, key: str, value: Any) -> None:
    assert refusal(config | {key: value}) == f"config.json: {key} is {value!r}; it must be a positive integer"


@pytest.mark.parametrize("key", POSITIVE_INTEGERS)
@pytest.mark.parametrize("explicit_null", [True, False])
def test_missing_integer(config: Config, key: str, explicit_null: bool) -> None:
    if explicit_null:
        config[key] = None
    else:
        del config[key]
    assert refusal(config) == f"config.json: {key} is missing; it must be a positive integer"


@pytest.mark.parametrize("key", BOOLEANS)
@pytest.mark.parametrize("value", ["true", 1, 0, "", []])
def test_not_a_boolean(config: Config, key: str, value: Any) -> None:
    assert refusal(config | {key: value}) == f"config.json: {key} is {value!r}; it must be true or false"


@pytest.mark.parametrize("value", [0.0, -1e-6, math.nan, math.inf, "1e-6", True, HUGE])
def test_bad_epsilon(config: Config, value: Any) -> None:
    message = refusal(config | {"rms_norm_eps": value})
    assert message == f"config.json: rms_norm_eps is {value!r}; it must be a finite number > 0"


@pytest.mark.parametrize("value", ["llama", "", 25, None, ["spark2_5"]])
def test_bad_model_type(config: Config, value: Any) -> None:
    message = refusal(config | {"model_type": value})
    assert message.startswith("config.json: model_type is ")
    assert "'spark2_5' or 'sparkx2_5'" in message
    assert value is None or repr(value) in message


@pytest.mark.parametrize("value", ["gelu_new", "gelu_pytorch_tanh", "silu", 0])
def test_bad_activation(config: Config, value: Any) -> None:
    assert (
        refusal(config | {"hidden_act": value}) == f"config.json: hidden_act is {value!r}; it must be 'gelu'"
    )


@pytest.mark.parametrize("value", ["relu", "Sigmoid", "", True])
def test_bad_gate_mode(config: Config, value: Any) -> None:
    message = refusal(config | {"gate_attn_act_mode": value})
    assert message == f"config.json: gate_attn_act_mode is {value!r}; it must be 'sigmoid' or 'silu'"


def test_ungated_heads(config: Config) -> None:
    assert "headwise_attn_output_gate is false" in refusal(config | {"headwise_attn_output_gate": False})


def test_heads_not_divisible(config: Config) -> None:
    message = refusal(config | {"num_key_value_heads": 3})
    assert message == "config.json: num_key_value_heads is 3; it must divide num_attention_heads (4)"


@pytest.mark.parametrize("value", ["linear_attention", "full", 1, None])
def test_unknown_layer_type(config: Config, value: Any) -> None:
    config["layer_types"] = [S, S, value, F]
    message = refusal(config)
    assert message.startswith("config.json: layer_types[2] is ")
    assert "'sliding_attention' or 'full_attention'" in message
    assert value is None or repr(value) in message


@pytest.mark.parametrize("count", [0, 3, 5])
def test_wrong_count_of_layer_types(config: Config, count: int) -> None:
    message = refusal(config | {"layer_types": [S] * count})
    assert message.startswith(f"config.json: layer_types names {count} layers; num_hidden_layers is 4")


@pytest.mark.parametrize("value", [S, {"0": S}, 4])
def test_layer_types_not_a_list(config: Config, value: Any) -> None:
    assert refusal(config | {"layer_types": value}).startswith(f"config.json: layer_types is {value!r};")


@pytest.mark.parametrize("kind", [F, S])
@pytest.mark.parametrize("value", [None, 10000.0, "default", []])
def test_rope_parameters_of_a_class_missing(config: Config, kind: str, value: Any) -> None:
    config["rope_parameters"][kind] = value
    assert refusal(config).startswith(f"config.json: rope_parameters.{kind} is missing")


@pytest.mark.parametrize("value", [None, {}, [], {"rope_theta": 1e4, "partial_rotary_factor": 1.0}])
def test_rope_parameters_missing_or_not_nested(config: Config, value: Any) -> None:
    assert refusal(config | {"rope_parameters": value}).startswith(
        "config.json: rope_parameters.sliding_attention is"
    )


@pytest.mark.parametrize("kind", [F, S])
@pytest.mark.parametrize(
    "value", [0, -1e4, math.nan, math.inf, -math.inf, "10000", True, HUGE, 1e300, 1e-300]
)
def test_bad_theta(config: Config, kind: str, value: Any) -> None:
    """1e300 and 1e-300 are finite, but not in the fp32 that frequencies are computed in."""
    set_rope(config, kind, rope_theta=value)
    assert refusal(config).startswith(f"config.json: rope_parameters.{kind}.rope_theta is {value!r};")


@pytest.mark.parametrize("kind", [F, S])
@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
def test_rope_key_missing(config: Config, kind: str, key: str) -> None:
    """No default: a wrong guess would be silent (the published 1.7B configs disagree on theta)."""
    set_rope(config, kind, **{key: None})
    assert refusal(config).startswith(f"config.json: rope_parameters.{kind}.{key} is missing;")


@pytest.mark.parametrize("value", [0, -0.25, 1.5, math.nan, "0.25", True])
def test_bad_partial_factor(config: Config, value: Any) -> None:
    set_rope(config, F, partial_rotary_factor=value)
    message = refusal(config)
    assert message.startswith(f"config.json: rope_parameters.{F}.partial_rotary_factor is {value!r};")


@pytest.mark.parametrize(("factor", "dims"), [(3 / 32, 3), (0.01, 0), (0.99, 31)])
def test_rotary_dimensions_not_even(config: Config, factor: float, dims: int) -> None:
    set_rope(config, F, partial_rotary_factor=factor)
    message = refusal(config)
    assert message.startswith(
        f"config.json: rope_parameters.{F}.partial_rotary_factor is {factor:g}, which rotates"
    )
    assert f"rotates {dims} of 32 dimensions" in message


@pytest.mark.parametrize("value", ["yarn", "linear", "dynamic", 1])
def test_rope_type_not_default(config: Config, value: Any) -> None:
    set_rope(config, S, rope_type=value)
    assert refusal(config) == f"config.json: rope_parameters.{S}.rope_type is {value!r}; it must be 'default'"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([S, F]),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=3)
    ),
    max_leaves=6,
)


@given(key=st.sampled_from(sorted(tiny.tiny_config())), value=JSON)
def test_any_value_is_read_or_refused_in_one_line(key: str, value: Any) -> None:
    """Whatever JSON a key holds, there is no other exception, and the message names the key."""
    try:
        args = ModelArgs.from_dict(tiny.tiny_config() | {key: value})
    except ConfigError as error:
        assert re.fullmatch(rf"config\.json: .*{key}.*", str(error))
    else:
        assert args.num_attention_heads % args.num_key_value_heads == 0
        assert len(args.layer_types) == args.num_hidden_layers
