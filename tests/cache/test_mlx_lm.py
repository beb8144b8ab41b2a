"""mlx-lm's own generators on these caches, with a small model that is easy to run without a cache."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator, generate_step, maybe_quantize_kv_cache, speculative_generate_step
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.cache import LRUPromptCache, trim_prompt_cache

from spark25_mlx.cache import FullKVCache, QuantizedFullKVCache, SlidingKVCache

_VOCABULARY, _HEADS, _D, _WINDOW = 50, 2, 32, 8


class Toy(nn.Module):
    """Two layers of attention, one of them sliding, with positions added to the keys."""

    def __init__(self, seed: int = 0, slack: int = 4) -> None:
        super().__init__()
        key = mx.random.split(mx.random.key(seed), 2)
        self.embedding = mx.random.normal((_VOCABULARY, _HEADS * _D), key=key[0])
        self.frequencies = mx.random.normal((_HEADS * _D,), key=key[1])
        self.layers = [0, 1]
        self.slack = slack

    def make_cache(self) -> list[Any]:
        return [SlidingKVCache(_WINDOW, self.slack), FullKVCache()]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        batch, length = inputs.shape
        x = self.embedding[inputs]
        offset = mx.array(0 if cache is None else cache[0].offset).reshape(-1, 1)
        positions = (offset + mx.arange(length))[..., None]
        for layer, window in enumerate((_WINDOW, None)):
            heads = lambda y: y.reshape(batch, length, _HEADS, _D).transpose(0, 2, 1, 3)  # noqa: E731
            q, k, v = heads(x), heads(x + mx.sin(positions * self.frequencies)), heads(x)
            if cache is None:
                mask: Any = create_causal_mask(length, window_size=window)
            else:
                mask = cache[layer].mask(length)
                k, v = cache[layer].append(k, v)
            own = None if cache is None else cache[layer]
            out = scaled_dot_product_attention(q, k, v, cache=own, scale=0.3, mask=mask)
            x = x + out.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        return x @ self.embedding.T


def greedy(model: Toy, prompt: list[int], n: int) -> list[int]:
    """The next n tokens, every one from the whole text."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(mx.argmax(model(mx.array([text]))[0, -1])))
    return text[len(prompt) :]


def prompt_of(n: int, seed: int) -> list[int]:
    return [int(x) for x in mx.random.randint(0, _VOCABULARY, (n,), key=mx.random.key(seed))]


def test_generation_in_chunks() -> None:
    model, prompt = Toy(), prompt_of(41, 1)
    steps = generate_step(mx.array(prompt), model, max_tokens=20, prefill_step_size=13)
    assert [token for token, _ in steps] == greedy(model, prompt, 20)


@pytest.mark.parametrize("draft_seed", [0, 9], ids=["good draft", "bad draft"])
def test_speculative_decoding_beyond_the_window(draft_seed: int) -> None:
    model, draft, prompt = Toy(), Toy(draft_seed), prompt_of(21, 2)
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, num_draft_tokens=3, max_tokens=25, prefill_step_size=10
    )
    assert [token for token, *_ in steps] == greedy(model, prompt, 25)


def test_a_batch_of_prompts_of_different_lengths_with_late_comers() -> None:
    model = Toy()
    prompts = [prompt_of(n, n) for n in (1, 30, 5, 2, 17, 9)]
    generator = BatchGenerator(
        model, max_tokens=12, prefill_batch_size=3, completion_batch_size=4, prefill_step_size=8
    )
    uids = generator.insert(prompts[:4])
    tokens: dict[int, list[int]] = {}
    caches: dict[int, list[Any]] = {}
    late = False
    while responses := generator.next_generated():
        for r in responses:
            tokens.setdefault(r.uid, []).append(r.token)
            if r.finish_reason is not None:
                caches[r.uid] = r.prompt_cache
        if not late and any(len(t) > 4 for t in tokens.values()):
            uids += generator.insert(prompts[4:])
            late = True
    assert late
    for uid, prompt in zip(uids, prompts, strict=True):
        assert tokens[uid] == greedy(model, prompt, 12), len(prompt)
        assert trim_prompt_cache(caches[uid], 1) == 1
        continued = generate_step(mx.array(tokens[uid][-1:]), model, max_tokens=6, prompt_cache=caches[uid])
        assert [token for token, _ in continued] == greedy(model, prompt + tokens[uid], 6)


def test_quantisation_leaves_the_sliding_layers() -> None:
    cache: list[Any] = [SlidingKVCache(8), FullKVCache()]
    maybe_quantize_kv_cache(cache, 0, 32, 8)
    assert [type(c) for c in cache] == [SlidingKVCache, QuantizedFullKVCache]
    model, prompt = Toy(), prompt_of(30, 3)
    steps = generate_step(
        mx.array(prompt), model, max_tokens=5, kv_bits=8, kv_group_size=32, quantized_kv_start=10
    )
    assert len([token for token, _ in steps]) == 5


def test_a_cache_from_the_prompt_cache_can_be_used_again_and_again() -> None:
    model, prompt = Toy(), prompt_of(30, 4)
    cache = model.make_cache()
    model(mx.array([prompt]), cache)
    store = LRUPromptCache()
    store.insert_cache("toy", prompt, cache)
    for seed in (5, 6, 5):
        question = prompt_of(9, seed)
        found, rest = store.fetch_nearest_cache("toy", prompt + question)
        assert rest == question
        steps = generate_step(mx.array(rest), model, max_tokens=9, prompt_cache=found)
        assert [token for token, _ in steps] == greedy(model, prompt + question, 9)


def test_copies_of_a_batch_go_their_own_ways() -> None:
    model = Toy()
    prompts = [prompt_of(20, 7), prompt_of(20, 8)]
    cache = model.make_cache()
    model(mx.array(prompts), cache)
    other = copy.deepcopy(cache)
    for tokens, own in (((1, 2), cache), ((3, 4), other)):
        got = model(mx.array(tokens)[:, None], own)[:, -1]
        want = model(mx.array([[*p, t] for p, t in zip(prompts, tokens, strict=True)]))[:, -1]
        assert mx.allclose(got, want, atol=1e-4).item()
