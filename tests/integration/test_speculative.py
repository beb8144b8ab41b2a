"""Speculative decoding is greedy decoding, before, across and behind the window's end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from spark25_mlx.cache import SlidingKVCache
from spark25_mlx.model import Model

from .conftest import greedy, native, ours, prompt_of

STEPS = 300


def speculate(model: Any, draft: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    return [t for t, _ in speculate_with_logprobs(model, draft, prompt, n, **options)]


def speculate_with_logprobs(
    model: Any, draft: Any, prompt: list[int], n: int, **options: Any
) -> list[tuple[int, np.ndarray]]:
    # By name, because that is how mlx-lm's own code finds it.
    step = sys.modules["mlx_lm.generate"].speculative_generate_step  # type: ignore[attr-defined]
    steps = step(mx.array(prompt), model, draft, max_tokens=n, **options)
    return [(t, np.array(logprobs)) for t, logprobs, _ in steps]


def agreement(model: Any, draft: Any, prompt: list[int]) -> tuple[int, float]:
    """Greedy tokens that speculation gives before one differs, and the largest error of a log-probability."""
    plain = generate_step(mx.array(prompt), model, max_tokens=STEPS)
    error = 0.0
    speculated = speculate_with_logprobs(model, draft, prompt, STEPS, num_draft_tokens=3)
    for i, ((a, p), (b, q)) in enumerate(zip(speculated, plain, strict=True)):
        error = max(error, float(np.abs(p - np.array(q)).max()))
        if a != b:
            return i, error
    return STEPS, error


@pytest.mark.parametrize("length", [10, 500, 512, 513, 2000])
def test_wrong_drafts(length: int, record_property: Callable[[str, object], None]) -> None:
    """A draft model with other weights: nearly every draft is taken back. mlx-lm's own model beside it."""
    prompt = prompt_of(length)
    agreed, error = agreement(ours(), ours(9), prompt)
    assert agreed == STEPS
    assert len(set(greedy(ours(), prompt, STEPS))) > 10
    # An fp32 model's rounding; a key too many or too few moves a log-probability by far more.
    assert error < 2e-4
    natively, native_error = agreement(native(), native(9), prompt)
    record_property("native_agrees_for", natively)
    record_property("native_error", native_error)
    print(
        f"\nprompt {length}: ours greedy for {agreed} of {STEPS} tokens, log-probabilities to {error:.1e}; "
        f"mlx-lm's own for {natively}, to {native_error:.1e}"
    )


@pytest.mark.parametrize("length", [500, 2000])
@pytest.mark.parametrize("drafts", [1, 64])
def test_right_drafts_and_other_lengths(length: int, drafts: int) -> None:
    """The draft model is the model: every draft is right, but the last ones are cut off by max_tokens."""
    prompt = prompt_of(length)
    want = greedy(ours(), prompt, 80)
    assert speculate(ours(), ours(), prompt, 80, num_draft_tokens=drafts) == want
    assert speculate(ours(), ours(9), prompt, 40, num_draft_tokens=drafts) == want[:40]


def test_caches_can_go_on() -> None:
    """What speculation leaves in the caches is the text without the drafts."""
    prompt = prompt_of(700)
    cache = make_prompt_cache(ours()) + make_prompt_cache(ours(9))
    text = prompt + speculate(ours(), ours(9), prompt, 20, prompt_cache=cache)
    held = cache[0].offset
    assert len(text) - 1 <= held <= len(text)
    assert all(c.offset == held for c in cache[:2])
    rest = [*text[held:], 5, 6]
    assert greedy(ours(), rest, 30, cache[:2]) == greedy(ours(), [*text[:held], *rest], 30)


def test_more_drafts_than_can_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(Model, "__call__", lambda *_, **__: called.append(1))
    cache = make_prompt_cache(ours()) + make_prompt_cache(ours(9))
    with pytest.raises(ValueError, match=r"--num-draft-tokens is 65; .* slack 64") as caught:
        speculate(ours(), ours(9), prompt_of(10), 5, num_draft_tokens=65, prompt_cache=cache)
    assert "\n" not in str(caught.value)
    assert not called
    with pytest.raises(ValueError, match=r"--num-draft-tokens is 9; .* slack 8"):
        cache[0] = SlidingKVCache(512, slack=8)
        speculate(ours(), ours(9), prompt_of(10), 5, num_draft_tokens=9, prompt_cache=cache)


def test_caches_without_those_of_the_draft_model() -> None:
    with pytest.raises(ValueError, match="has 2 layers; model and draft model have 2 and 2"):
        speculate(ours(), ours(9), prompt_of(10), 5, prompt_cache=ours().make_cache())


def test_caches_of_mlx_lm_are_taken_over() -> None:
    """From a prompt cache file that mlx-lm made: its rotating cache says that it cannot be trimmed."""
    prompt = prompt_of(700)
    cache: list[Any] = native().make_cache() + native(9).make_cache()
    for model, part in ((native(), cache[:2]), (native(9), cache[2:])):
        model(mx.array(prompt[:-1])[None], part)
    assert speculate(ours(), ours(9), prompt[-1:], 60, prompt_cache=cache) == greedy(ours(), prompt, 60)
