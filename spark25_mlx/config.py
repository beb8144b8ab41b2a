"""`config.json` of a Spark-X2.5 / X2.6 checkpoint, read into `ModelArgs` and checked key by key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL_TYPES = ("spark2_5", "sparkx2_5")
FULL = "full_attention"
SLIDING = "sliding_attention"
LAYER_TYPES = (SLIDING, FULL)
# The family's pattern, used by configs that were saved again without `layer_types`.
DEFAULT_PATTERN = (SLIDING, SLIDING, SLIDING, FULL)
GATE_MODES = ("sigmoid", "silu")
# The normal numbers of fp32.
_FP32_LEAST, _FP32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class ConfigError(ValueError):
    """A key of config.json that is missing, or whose value the model cannot have."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"config.json: {key} {problem}")


@dataclass(frozen=True)
class RopeArgs:
    """Rotary embedding of one layer class.

    Attributes:
        theta: base of the frequencies, > 0.
        dims: leading dimensions of a head that are rotated; even, <= head_dim.
    """

    theta: float
    dims: int


@dataclass(frozen=True)
class ModelArgs:
    """Shape of a Spark model. Build it with `from_dict`, which validates.

    Attributes:
        layer_types: one of `LAYER_TYPES` per layer.
        rope: the rotary embedding of each layer class in use.
        tie_word_embeddings: None when the config does not say; the checkpoint then decides, by whether it
            holds an `lm_head`.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    sliding_window: int
    layer_types: tuple[str, ...]
    rope: Mapping[str, RopeArgs]
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    gate_attn_act_mode: str = "sigmoid"
    tie_word_embeddings: bool | None = None

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelArgs:
        """Read a `config.json` mapping; keys that the model does not use are ignored.

        Raises:
            ConfigError: a key is missing or has a value that is not allowed; the message names the key, the
                value and what is allowed.
        """
        _one_of(config, "model_type", MODEL_TYPES)
        _one_of(config, "hidden_act", ("gelu",), default="gelu")
        if not _boolean(config, "headwise_attn_output_gate", default=True):
            raise ConfigError("headwise_attn_output_gate", "is false; the Spark block always gates its heads")

        heads = _positive(config, "num_attention_heads")
        kv_heads = _positive(config, "num_key_value_heads")
        if heads % kv_heads:
            raise ConfigError(
                "num_key_value_heads", f"is {kv_heads}; it must divide num_attention_heads ({heads})"
            )
        head_dim = _positive(config, "head_dim")
        layers = _positive(config, "num_hidden_layers")
        layer_types = _layer_types(config, layers)
        tied = _boolean(config, "tie_word_embeddings") if "tie_word_embeddings" in config else None
        return cls(
            model_type=config["model_type"],
            hidden_size=_positive(config, "hidden_size"),
            intermediate_size=_positive(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_positive(config, "vocab_size"),
            sliding_window=_positive(config, "sliding_window"),
            layer_types=layer_types,
            rope={kind: _rope(config, kind, head_dim) for kind in dict.fromkeys(layer_types)},
            rms_norm_eps=_real(config, "rms_norm_eps", default=1e-6),
            attention_bias=_boolean(config, "attention_bias", default=False),
            mlp_bias=_boolean(config, "mlp_bias", default=False),
            gate_attn_act_mode=_one_of(config, "gate_attn_act_mode", GATE_MODES, default="sigmoid"),
            tie_word_embeddings=tied,
        )


def _get(config: Mapping[str, Any], key: str, default: Any, allowed: str) -> Any:
    value = config.get(key, default)
    if value is None:
        raise ConfigError(key, f"is missing; it must be {allowed}")
    return value


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = _get(config, key, None, "a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(key, f"is {value!r}; it must be a positive integer")
    return value


def _real(
    config: Mapping[str, Any],
    key: str,
    *,
    default: float | None = None,
    most: float | None = None,
    name: str = "",
) -> float:
    """A normal fp32 number in (0, most]; `name` is the key as the error calls it."""
    allowed = "a finite number > 0" + ("" if most is None else f" and <= {most:g}")
    value = config.get(key, default)
    if value is None:
        raise ConfigError(name or key, f"is missing; it must be {allowed}")
    # The model computes in fp32, where the number must be one too.
    number = float(value) if _is_number(value) and abs(value) <= _FP32_MOST else math.nan
    if not _FP32_LEAST <= number <= (most or _FP32_MOST):
        raise ConfigError(name or key, f"is {value!r}; it must be {allowed}")
    return number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _boolean(config: Mapping[str, Any], key: str, *, default: bool | None = None) -> bool:
    value = _get(config, key, default, "true or false")
    if not isinstance(value, bool):
        raise ConfigError(key, f"is {value!r}; it must be true or false")
    return value


def _one_of(
    config: Mapping[str, Any], key: str, allowed: tuple[str, ...], *, default: str | None = None
) -> str:
    listed = " or ".join(repr(name) for name in allowed)
    value = _get(config, key, default, listed)
    if value not in allowed:
        raise ConfigError(key, f"is {value!r}; it must be {listed}")
    return value


def _layer_types(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(DEFAULT_PATTERN[i % len(DEFAULT_PATTERN)] for i in range(layers))
    if not isinstance(kinds, list | tuple):
        raise ConfigError("layer_types", f"is {kinds!r}; it must be a list with a layer type for each layer")
    if len(kinds) != layers:
        raise ConfigError(
            "layer_types", f"names {len(kinds)} layers; num_hidden_layers is {layers} and the two must agree"
        )
    for i, kind in enumerate(kinds):
        _one_of({f"layer_types[{i}]": kind}, f"layer_types[{i}]", LAYER_TYPES)
    return tuple(kinds)


def _rope(config: Mapping[str, Any], kind: str, head_dim: int) -> RopeArgs:
    where = f"rope_parameters.{kind}"
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get(kind), Mapping):
        raise ConfigError(where, "is missing; it must hold rope_theta and partial_rotary_factor")
    entry = parameters[kind]
    rope_type = entry.get("rope_type", "default")
    if rope_type != "default":
        raise ConfigError(f"{where}.rope_type", f"is {rope_type!r}; it must be 'default'")
    theta = _real(entry, "rope_theta", name=f"{where}.rope_theta")
    factor = _real(entry, "partial_rotary_factor", most=1.0, name=f"{where}.partial_rotary_factor")
    dims = int(head_dim * factor)
    if dims == 0 or dims % 2:
        raise ConfigError(
            f"{where}.partial_rotary_factor",
            f"is {factor:g}, which rotates {dims} of {head_dim} dimensions; the number must be even and > 0",
        )
    return RopeArgs(theta=theta, dims=dims)
