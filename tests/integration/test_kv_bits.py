"""`--kv-bits`: the full layers are quantised and the sliding ones are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache

from spark25_mlx import cli
from spark25_mlx.cache import (
    FullKVCache,
    LayerCache,
    QuantizedFullKVCache,
    SlidingKVCache,
    TurboFullKVCache,
)
from spark25_mlx.model import Model
from tests.tiny import F, S, build, random_weights, tiny_config

from .conftest import prompt_of

CONFIG = tiny_config(
    sliding_window=512,
    head_dim=64,
    num_hidden_layers=2,
    layer_types=[S, F],
    tie_word_embeddings=False,
)


@lru_cache
def model_in(dtype: mx.Dtype) -> Model:
    return build(CONFIG, random_weights(CONFIG), dtype)


@lru_cache
def cache_of(dtype: mx.Dtype, tokens: int) -> list[LayerCache]:
    """Unquantised; not to be changed."""
    cache = model_in(dtype).make_cache()
    model_in(dtype)(mx.array([prompt_of(tokens)]), cache)
    return cache


def next_logits(dtype: mx.Dtype, tokens: int, bits: int | None) -> tuple[np.ndarray, float]:
    """Logits of 100 and 10 more tokens, in a piece and one by one; and the full layer's bytes a token."""
    cache: list[LayerCache] = copy.deepcopy(cache_of(dtype, tokens))
    maybe_quantize_kv_cache(cache, 0, 64, bits)
    assert [type(c) for c in cache] == [SlidingKVCache, FullKVCache if bits is None else QuantizedFullKVCache]
    size = sum(x.nbytes for x in cache[1].state[0]) / tokens
    more = prompt_of(110, 3)
    pieces = [more[:100], *([token] for token in more[100:])]
    out = [model_in(dtype)(mx.array([piece]), cache).astype(mx.float32) for piece in pieces]
    return np.concatenate([np.array(x) for x in out], axis=1), size


@pytest.mark.parametrize("length", [1024, 8192])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["fp32", "bf16"])
def test_distance_and_bytes(
    length: int, dtype: mx.Dtype, record_property: Callable[[str, object], None]
) -> None:
    """Distance: rms of the logits' error over rms of the logits.

    On a CPU mlx adds up a quantised product in bf16 if the activations are, which hides what the bits do.
    """
    exact, plain = next_logits(dtype, length, None)
    width = dtype.size
    assert plain == 2 * 64 * width
    for bits, most in ((8, 0.05), (4, 0.1)):
        logits, size = next_logits(dtype, length, bits)
        assert size == 2 * (64 * bits / 8 + 2 * width)
        distance = float(np.sqrt(np.square(logits - exact).mean() / np.square(exact).mean()))
        assert 0 < distance < most
        record_property(f"distance_{bits}", distance)
        print(f"\n{length} tokens, {bits} bits: distance {distance:.1e}, {size:g} of {plain} bytes a token")


def test_quantised_from_a_position_on() -> None:
    """Until then the text is that of an unquantised cache; whatever the start, all is quantised then."""
    cache = model_in(mx.bfloat16).make_cache()
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 700, "prefill_step_size": 300}
    steps = generate_step(
        mx.array(prompt_of(650)), model_in(mx.bfloat16), max_tokens=100, prompt_cache=cache, **options
    )
    text = [token for token, _ in steps]
    plain = generate_step(mx.array(prompt_of(650)), model_in(mx.bfloat16), max_tokens=100)
    assert text[:50] == [token for token, _ in plain][:50]
    assert isinstance(cache[1], QuantizedFullKVCache)
    assert (cache[1].bits, cache[1].group_size) == (8, 32)
    assert cache[1].offset == cache[0].offset == 750


@pytest.mark.parametrize("bits", ["8", "4"])
def test_generate(bits: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(checkpoint), "-p", "hello " * 30, "-m", "5", "--quantized-kv-start", "0"]
    assert cli.main(["generate", *arguments, "--kv-bits", bits]) == 0
    assert "Generation: 5 tokens" in capsys.readouterr().out


def test_rotated_rows(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPARK25_KV_FORMAT chooses them for --kv-bits 4; there are none of other bits."""
    monkeypatch.setenv("SPARK25_KV_FORMAT", "turbo")
    arguments = ["--model", str(checkpoint), "-p", "hello " * 30, "-m", "5", "--quantized-kv-start", "0"]
    assert cli.main(["generate", *arguments, "--kv-bits", "4"]) == 0
    assert "Generation: 5 tokens" in capsys.readouterr().out
    assert cli.main(["generate", *arguments, "--kv-bits", "8"]) == 1
    assert "SPARK25_KV_FORMAT=turbo has 4 bits a value, and 8 are asked for" in capsys.readouterr().err


def test_bytes_and_distance_of_rotated_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take fewer bytes than affine rows of four bits, and logits are about as near to exact ones."""
    dtype, tokens = mx.float32, mx.array([prompt_of(100, 3)])
    wanted = np.array(model_in(dtype)(tokens, copy.deepcopy(cache_of(dtype, 1024))))
    sizes, distances = [], []
    for kv_format, kind in (("affine", QuantizedFullKVCache), ("turbo", TurboFullKVCache)):
        monkeypatch.setenv("SPARK25_KV_FORMAT", kv_format)
        cache: list[LayerCache] = copy.deepcopy(cache_of(dtype, 1024))
        maybe_quantize_kv_cache(cache, 0, 64, 4)
        assert type(cache[1]) is kind
        sizes.append(sum(x.nbytes for x in cache[1].state[0]) / 1024)
        logits = np.array(model_in(dtype)(tokens, cache))
        distances.append(float(np.sqrt(np.square(logits - wanted).mean() / np.square(wanted).mean())))
    print(f"\naffine, turbo: distance {distances[0]:.1e}, {distances[1]:.1e}, {sizes} bytes a token")
    assert sizes == [2 * (64 / 2 + 8), 2 * (64 / 2 + 4)]
    assert 0 < distances[1] <= 1.1 * distances[0] < 0.03


def test_bits_that_do_not_exist(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(checkpoint), "-p", "hello", "--quantized-kv-start", "0", "--kv-bits", "5"]
    assert cli.main(["generate", *arguments]) == 1
    assert "bits is 5; a quantised cache has 4 or 8" in capsys.readouterr().err
