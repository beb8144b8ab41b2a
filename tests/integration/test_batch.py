"""Prompts of different lengths in a batch are answered as they are alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate
from mlx_lm.utils import load

from .conftest import greedy, ours, prompt_of

LENGTHS = (5, 40, 170, 600)


class Plain:
    """What `batch_generate` needs of a tokenizer, with texts of token ids."""

    eos_token_ids = (96,)

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.parametrize(
    "options", [{}, {"prefill_step_size": 64, "prefill_batch_size": 2, "completion_batch_size": 3}]
)
def test_batch_generate(options: dict[str, Any]) -> None:
    prompts = [prompt_of(length, length) for length in LENGTHS]
    done = batch_generate(
        ours(), Plain(), prompts, max_tokens=60, return_token_ids=True, return_prompt_caches=True, **options
    )
    assert done.token_ids is not None and done.caches is not None
    for prompt, tokens, cache in zip(prompts, done.token_ids, done.caches, strict=True):
        alone = greedy(ours(), prompt, 60)
        end = alone.index(96) if 96 in alone else len(alone)
        assert tokens == alone[:end]
        if end == len(alone):
            text = prompt + tokens
            held = cache[0].offset
            rest = [*text[held:], 7]
            assert greedy(ours(), rest, 20, cache) == greedy(ours(), [*text[:held], *rest], 20)


def test_batches_that_go_on() -> None:
    """Caches of conversations of different lengths, past and before the window, into one batch."""
    prompts = [prompt_of(length, length) for length in LENGTHS]
    caches = []
    for prompt in prompts:
        cache = ours().make_cache()
        ours()(mx.array([prompt]), cache)
        caches.append(cache)
    questions = [prompt_of(n, n) for n in (3, 1, 30, 700)]
    done = batch_generate(
        ours(), Plain(), questions, prompt_caches=caches, max_tokens=20, return_token_ids=True
    )
    assert done.token_ids is not None
    for prompt, question, tokens in zip(prompts, questions, done.token_ids, strict=True):
        alone = greedy(ours(), prompt + question, 20)
        assert tokens == alone[: alone.index(96) if 96 in alone else 20]


def test_loaded_checkpoint(checkpoint: Any) -> None:
    """With window 64, prompts of text, through mlx-lm's loader."""
    model, tokenizer = load(str(checkpoint))[:2]
    prompts = [tokenizer.encode("word " * n)[:-1] for n in (1, 8, 34, 120)]
    done = batch_generate(model, tokenizer, prompts, max_tokens=40, return_token_ids=True)
    assert done.token_ids is not None
    for prompt, tokens in zip(prompts, done.token_ids, strict=True):
        assert tokens == greedy(model, prompt, 40)[: len(tokens)]
        assert len(tokens) == 40 or greedy(model, prompt, 40)[len(tokens)] in tokenizer.eos_token_ids
