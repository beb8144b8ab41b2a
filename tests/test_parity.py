"""The model against float64, against itself by other routes, and against mlx-lm's own model.

The `check_*` functions hold the claims; tests/mutations.py lists the faults that they must notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import reference
from tests.tiny import (
    Config,
    F,
    S,
    Weights,
    build,
    build_native,
    in_dtype,
    logits_of,
    random_tokens,
    random_weights,
    tiny_config,
)

# Largest error of fp32 logits against float64, relative to the largest logit; about five times what is seen.
TOLERANCE = 3e-5
# Between two fp32 models whose rotary embeddings round differently.
NATIVE_TOLERANCE = 1e-4

BOUNDARIES = (1, 63, 64, 65, 511, 512, 513, 700)


class Disagreement(AssertionError):
    """Logits that are not what they must be."""


@dataclass(frozen=True)
class Variant:
    """A shape of the model.

    Attributes:
        changes: keys of `tiny_config`.
        lengths: prompt lengths at which its logits are compared.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 65, 150)

    @property
    def config(self) -> Config:
        return tiny_config(**self.changes)


VARIANTS = {
    "base": Variant(lengths=BOUNDARIES),
    "window_5": Variant({"sliding_window": 5}, BOUNDARIES),
    "window_1": Variant({"sliding_window": 1}),
    "window_512_two_periods": Variant(
        {"sliding_window": 512, "num_hidden_layers": 8, "layer_types": [S, S, S, F] * 2}, BOUNDARIES
    ),
    "layer_types_missing": Variant({"layer_types": None, "num_hidden_layers": 6}),
    "full_first": Variant({"layer_types": [F, S, F, S]}),
    "sliding_only": Variant({"layer_types": [S] * 4}),
    "full_only": Variant({"layer_types": [F] * 4}),
    "silu_gate": Variant({"gate_attn_act_mode": "silu"}),
    "biases": Variant({"attention_bias": True, "mlp_bias": True}),
    "untied": Variant({"tie_word_embeddings": False}),
    "gqa_4_4": Variant({"num_key_value_heads": 4}),
    "gqa_6_2": Variant({"num_attention_heads": 6, "num_key_value_heads": 2}),
    "head_dim_64": Variant({"head_dim": 64}),
    "head_dim_128": Variant({"head_dim": 128}),
    "head_dim_256": Variant({"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "hidden_equals_heads": Variant({"hidden_size": 128}),
    "large_epsilon": Variant({"rms_norm_eps": 0.5}),
    "silu_biases_untied": Variant(
        {
            "gate_attn_act_mode": "silu",
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "layer_types": [F, S, S, S],
        }
    ),
}


@lru_cache
def weights_of(variant: str) -> Weights:
    return random_weights(VARIANTS[variant].config)


@lru_cache
def tokens_of(variant: str) -> np.ndarray:
    """Two prompts of the longest length [2, L]."""
    config = VARIANTS[variant].config
    return random_tokens(config, max(VARIANTS[variant].lengths), batch=2)


@lru_cache
def expected(variant: str, row: int = 0) -> np.ndarray:
    """Float64 logits of a prompt of `tokens_of`; the model is causal, so they serve every shorter one."""
    return reference.forward(weights_of(variant), VARIANTS[variant].config, tokens_of(variant)[row : row + 1])


def relative_error(actual: np.ndarray, wanted: np.ndarray) -> float:
    """max |a - b| / max |b|."""
    return float(np.abs(actual - wanted).max() / np.abs(wanted).max())


def relative_rms(actual: np.ndarray, wanted: np.ndarray) -> float:
    """rms(a - b) / rms(b)."""
    return float(np.sqrt(np.square(actual - wanted).mean() / np.square(wanted).mean()))


def assert_close(actual: np.ndarray, wanted: np.ndarray, tolerance: float = TOLERANCE) -> None:
    if actual.shape != wanted.shape:
        raise Disagreement(f"logits have shape {actual.shape}, not {wanted.shape}")
    error = relative_error(actual, wanted)
    if not error <= tolerance:
        raise Disagreement(f"relative error {error:.2e} is above {tolerance:.0e}")


def check_forward(variant: str, length: int) -> None:
    """One call without a cache gives the float64 logits."""
    model = build(VARIANTS[variant].config, weights_of(variant))
    assert_close(logits_of(model, tokens_of(variant)[:1, :length]), expected(variant)[:, :length])


def check_chunks(variant: str, lengths: Iterable[int]) -> None:
    """A prompt fed to a cache in pieces of these lengths gives the float64 logits, piece by piece."""
    model = build(VARIANTS[variant].config, weights_of(variant))
    cache, start = model.make_cache(), 0
    for length in lengths:
        piece = tokens_of(variant)[:1, start : start + length]
        assert_close(logits_of(model, piece, cache), expected(variant)[:, start : start + length])
        start += length


def check_decode(variant: str, prompt: int, steps: int) -> None:
    """A prompt and then one token a call."""
    check_chunks(variant, [prompt] + [1] * steps)


def check_batch(variant: str, length: int) -> None:
    """Every row of a batch gives the float64 logits of that row, with and without a cache."""
    model = build(VARIANTS[variant].config, weights_of(variant))
    tokens = tokens_of(variant)[:, :length]
    for cache in (None, model.make_cache()):
        logits = logits_of(model, tokens, cache)
        for row in range(2):
            assert_close(logits[row : row + 1], expected(variant, row)[:, :length])


@pytest.mark.parametrize(
    ("variant", "length"), [(name, length) for name, v in VARIANTS.items() for length in v.lengths]
)
def test_forward(variant: str, length: int) -> None:
    check_forward(variant, length)


@pytest.mark.parametrize("variant", ["base", "window_5", "full_first", "silu_biases_untied"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunked_prefill(variant: str, chunk: int) -> None:
    check_chunks(variant, [chunk] * (150 // chunk) + [150 % chunk] * bool(150 % chunk))


@pytest.mark.parametrize("variant", ["base", "window_5", "window_1"])
def test_irregular_chunks(variant: str) -> None:
    check_chunks(variant, [3, 1, 70, 1, 1, 5, 64, 2, 1])


def test_chunks_across_a_wide_window() -> None:
    check_chunks("window_512_two_periods", [511, 1, 1, 187])


@pytest.mark.parametrize(
    ("variant", "prompt", "steps"),
    [
        ("base", 1, 140),  # past two wraps of the window of 64
        ("base", 100, 40),
        ("window_5", 3, 20),  # past four
        ("window_1", 2, 5),
        ("window_512_two_periods", 505, 20),
        ("head_dim_256", 60, 10),
        ("silu_biases_untied", 60, 80),
    ],
)
def test_decode(variant: str, prompt: int, steps: int) -> None:
    check_decode(variant, prompt, steps)


@pytest.mark.parametrize("variant", ["base", "window_5", "biases"])
def test_batch_rows_are_single_rows(variant: str) -> None:
    check_batch(variant, 100)


def test_ragged_batch() -> None:
    """Prompts of several lengths, padded on the right, then decoded steps: every row as if it were alone."""
    variant, lengths, steps = "base", (5, 40, 17, 70), 6
    model = build(VARIANTS[variant].config, weights_of(variant))
    width = max(lengths)
    single = [model.make_cache() for _ in lengths]
    cache = [layers[0].merge(layers) for layers in zip(*single, strict=True)]
    tokens = tokens_of(variant)[0]
    prompts = np.stack([np.pad(tokens[:length], (0, width - length)) for length in lengths])
    for layer in cache:
        layer.prepare(lengths=lengths, right_padding=[width - length for length in lengths])
    prompt_logits = logits_of(model, prompts, cache)
    for layer in cache:
        layer.finalize()
    decoded = [
        logits_of(model, np.stack([tokens[[length + step]] for length in lengths]), cache)
        for step in range(steps)
    ]
    for row, length in enumerate(lengths):
        rows = [prompt_logits[row : row + 1, :length], *(logits[row : row + 1] for logits in decoded)]
        assert_close(np.concatenate(rows, axis=1), expected(variant)[:, : length + steps])


def test_input_embeddings_replace_the_ids() -> None:
    model = build(VARIANTS["base"].config, weights_of("base"))
    tokens = mx.array(tokens_of("base")[:1, :65])
    logits = model(tokens, None, model.model.embedding(tokens))
    assert_close(np.array(logits).astype(np.float64), expected("base")[:, :65])


def test_reference_is_causal() -> None:
    """What `expected` rests on."""
    config, weights, tokens = VARIANTS["base"].config, weights_of("base"), tokens_of("base")[:1]
    short = reference.forward(weights, config, tokens[:, :80])
    assert relative_error(short, expected("base")[:, :80]) < 1e-12


NATIVE = [name for name, variant in VARIANTS.items() if "gate_attn_act_mode" not in variant.changes]


@pytest.mark.parametrize("variant", NATIVE)
def test_native_model_agrees(variant: str) -> None:
    """Same weights in mlx-lm's own class (which has no silu gate), in one call and in chunks."""
    config, weights = VARIANTS[variant].config, weights_of(variant)
    ours, native = build(config, weights), build_native(config, weights)
    assert type(native) is not type(ours)
    tokens = tokens_of(variant)[:1, :150]
    assert_close(logits_of(ours, tokens), logits_of(native, tokens), NATIVE_TOLERANCE)
    caches = ours.make_cache(), native.make_cache()
    for start in range(0, 150, 50):
        piece = tokens[:, start : start + 50]
        assert_close(logits_of(ours, piece, caches[0]), logits_of(native, piece, caches[1]), NATIVE_TOLERANCE)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("variant", ["base", "window_5", "biases", "gqa_4_4", "head_dim_128"])
def test_half_precision_is_nearer_than_native(
    variant: str, dtype: mx.Dtype, record_property: Callable[[str, object], None]
) -> None:
    """Distance to float64 on the same rounded weights, ours and mlx-lm's."""
    config = VARIANTS[variant].config
    weights = in_dtype(weights_of(variant), dtype)
    tokens = tokens_of(variant)[:1, :150]
    wanted = reference.forward(weights, config, tokens)
    ours = relative_rms(logits_of(build(config, weights, dtype), tokens), wanted)
    native = relative_rms(logits_of(build_native(config, weights, dtype), tokens), wanted)
    record_property("relative_rms_ours", ours)
    record_property("relative_rms_native", native)
    print(f"\n{variant} {dtype}: relative rms to float64: ours {ours:.2e}, mlx-lm {native:.2e}")
    assert 0 < ours <= native
