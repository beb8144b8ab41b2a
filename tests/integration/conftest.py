"""Small models with the published window, a checkpoint that chats, and the plugin enabled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spark25_mlx import plugin
from spark25_mlx.model import Model
from tests.tiny import Config, S, build, build_native, random_weights, tiny_config

TEMPLATE = Path(__file__).parents[2] / "examples" / "tiny" / "chat_template.jinja"
FIRST_TOKENS = ["<｜start▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>"]
ROLES = ["<|System|>", "<|User|>", "<|Bot|>", "<|Tool|>", "<|Developer|>"]

# One layer of each class, with the published window and narrow heads. With a tied head, a random model would
# repeat its last token for ever, which hides faults.
WINDOW_512 = tiny_config(
    sliding_window=512, num_hidden_layers=2, layer_types=[S, "full_attention"], tie_word_embeddings=False
)


@pytest.fixture(autouse=True)
def plugin_enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SPARK25_SNAPSHOTS", raising=False)
    assert plugin.enable()
    yield
    plugin.disable()


@lru_cache
def ours(seed: int = 0) -> Model:
    """This package's model with window 512; another seed gives other weights."""
    return build(WINDOW_512, random_weights(WINDOW_512, seed))


@lru_cache
def native(seed: int = 0) -> Any:
    """mlx-lm's own model with the same weights."""
    return build_native(WINDOW_512, random_weights(WINDOW_512, seed))


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Random tokens, without 0, which begins a turn."""
    return np.random.default_rng(seed).integers(1, WINDOW_512["vocab_size"], length).tolist()


def greedy(model: Any, prompt: Sequence[int], n: int, cache: list[Any] | None = None) -> list[int]:
    """The n most likely next tokens, by mlx-lm's plain generation."""
    return [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=cache)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random fp32 model with window 64, the family's template, and its special tokens beside 256 bytes."""
    folder = tmp_path_factory.mktemp("chat")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*FIRST_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in FIRST_TOKENS + ROLES:
        tokenizer.add_tokens([AddedToken(token, special="think" not in token, normalized=False)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=FIRST_TOKENS[0],
        eos_token=FIRST_TOKENS[1],
        chat_template=TEMPLATE.read_text(),
    ).save_pretrained(folder)
    config: Config = tiny_config(vocab_size=tokenizer.get_vocab_size(), head_dim=64, eos_token_id=1)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: mx.array(w) for name, w in random_weights(config).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder
