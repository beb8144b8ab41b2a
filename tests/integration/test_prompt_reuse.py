"""mlx-lm's store of conversations: what a prompt that leaves an earlier one has to compute again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache, LRUPromptCache

from spark25_mlx import plugin, prompt_cache
from spark25_mlx.cache import SlidingKVCache
from spark25_mlx.model import Model
from spark25_mlx.snapshots import AutoSnapshots
from tests.tiny import build, random_weights

from .conftest import WINDOW_512, greedy, native, ours, prompt_of

SHARED, LENGTH = 3000, 3200
# Keys and values of the last 511 tokens in fp32.
SNAPSHOT = 511 * 2 * WINDOW_512["num_key_value_heads"] * WINDOW_512["head_dim"] * 4


class Counted:
    """A model that counts the tokens that it is given."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tokens = 0
        self.layers = model.layers
        self.make_cache = model.make_cache

    def __call__(self, inputs: mx.array, **kwargs: Any) -> mx.array:
        self.tokens += inputs.size
        return self.model(inputs, **kwargs)


def answer(model: Any, store: LRUPromptCache, prompt: list[int], n: int) -> tuple[list[int], int]:
    """One request, as mlx_lm.server serves it: the answer, and the prompt's tokens that were computed."""
    counted = Counted(model)
    cache, rest = store.fetch_nearest_cache("model", prompt)
    assert rest == prompt[len(prompt) - len(rest) :]
    if cache is None:
        cache = model.make_cache()
    text: list[int] = []
    for token, _ in generate_step(mx.array(rest), counted, max_tokens=n, prompt_cache=cache):
        text.append(token)
    # The last token sampled has gone through the model too; n are not of the prompt.
    store.insert_cache("model", prompt + text, cache)
    return text, counted.tokens - n


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """Ours, with a budget of four snapshots, which is what the default is for the 4B model in bf16."""
    monkeypatch.setattr(ours(), "snapshots", AutoSnapshots(max_bytes=4 * SNAPSHOT))
    return ours()


def diverging(turns: list[int]) -> tuple[list[int], list[int]]:
    """Two prompts of LENGTH tokens that have SHARED in common, with turns beginning at these positions."""
    prompts = [prompt_of(LENGTH, 1), prompt_of(SHARED, 1) + prompt_of(LENGTH - SHARED, 2)]
    assert prompts[0][SHARED] != prompts[1][SHARED]
    for prompt in prompts:
        for position in turns:
            prompt[position] = 0
    return prompts[0], prompts[1]


@pytest.mark.parametrize(
    ("turns", "most"),
    [
        pytest.param([], LENGTH - 2048, id="every_1024"),
        pytest.param([0, 700, 900, 2100, 2990], LENGTH - 2990, id="turns"),
        pytest.param([0, *range(100, 3000, 58)], LENGTH - 2048, id="many_turns"),
    ],
)
def test_diverging_prompt(
    model: Model, turns: list[int], most: int, record_property: Callable[[str, object], None]
) -> None:
    """The answer is that of a cold run, from fewer tokens; mlx-lm's own computes all of them again."""
    first, second = diverging(turns)
    counts = {}
    for name, its_model in (("ours", model), ("native", native())):
        store = LRUPromptCache()
        _, computed = answer(its_model, store, first, 5)
        assert computed == LENGTH
        text, counts[name] = answer(its_model, store, second, 40)
        assert text == greedy(its_model, second, 40)
        record_property(f"recomputed_{name}", counts[name])
    assert counts["ours"] <= most
    print(
        f"\n{SHARED} of {LENGTH} tokens shared; computed again: ours {counts['ours']}, "
        f"native {counts['native']}"
    )


def test_a_prompt_that_differs_at_its_end_is_trimmed(model: Model) -> None:
    store = LRUPromptCache()
    first = prompt_of(1500, 1)
    answer(model, store, first, 10)
    second = first[:1470] + prompt_of(20, 2)
    text, computed = answer(model, store, second, 30)
    assert computed == 20
    assert text == greedy(model, second, 30)


def test_the_same_prompt_again_computes_its_last_token(model: Model) -> None:
    """Also when it equals all that is stored, where mlx-lm leaves nothing to compute."""
    store = LRUPromptCache()
    prompt = prompt_of(900, 1)
    cache = model.make_cache()
    model(mx.array([prompt]), cache)
    store.insert_cache("model", prompt, cache)
    text, computed = answer(model, store, prompt, 20)
    assert computed == 1
    assert text == greedy(model, prompt, 20)


def test_the_next_turn_computes_only_itself(model: Model) -> None:
    store = LRUPromptCache()
    prompt = prompt_of(900, 1)
    text, _ = answer(model, store, prompt, 20)
    longer = prompt + text + prompt_of(50, 2)
    more, computed = answer(model, store, longer, 20)
    assert computed == 50
    assert more == greedy(model, longer, 20)


def test_another_model_key_finds_nothing(model: Model) -> None:
    store = LRUPromptCache()
    prompt = prompt_of(100, 1)
    answer(model, store, prompt, 5)
    assert store.fetch_nearest_cache("other", prompt) == (None, prompt)


def test_the_stored_cache_that_saves_most_is_taken(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer common beginning is worth less if its cache cannot go back."""
    prompt = prompt_of(2500, 1)
    store = LRUPromptCache()
    monkeypatch.setattr(model, "snapshots", None)
    answer(model, store, prompt[:1200], 5)
    answer(model, store, prompt, 5)
    text, computed = answer(model, store, prompt[:2000] + prompt_of(40, 2), 20)
    assert computed == 2040 - 1200
    assert text == greedy(model, prompt[:2000] + prompt_of(40, 2), 20)


@pytest.mark.parametrize("order", [1, -1])
def test_a_few_tokens_more_decide(model: Model, order: int) -> None:
    prompt = prompt_of(500, 1)
    store = LRUPromptCache()
    for length in (400, 410)[::order]:
        answer(model, store, prompt[:length] + prompt_of(20, length), 5)
    _, computed = answer(model, store, prompt, 5)
    assert computed == 500 - 410


def test_nothing_that_helps(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that can only go back to its beginning is no cache."""
    monkeypatch.setattr(model, "snapshots", None)
    store = LRUPromptCache()
    prompt = prompt_of(1000, 1)
    answer(model, store, prompt, 5)
    asked = prompt[:300] + prompt_of(10, 2)
    assert store.fetch_nearest_cache("model", asked) == (None, asked)


# What stays in the store


def stored(store: LRUPromptCache) -> list[int]:
    return sorted(len(key) for key in prompt_cache._keys(store, "model"))


def filled(model: Model, prompt: list[int]) -> list[Any]:
    cache = model.make_cache()
    for start in range(0, len(prompt), 512):
        model(mx.array([prompt[start : start + 512]]), cache)
    return cache


def test_beginnings_that_cannot_be_rebuilt_stay(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "snapshots", None)
    store = LRUPromptCache()
    prompt = prompt_of(2000, 1)
    for length in (100, 500, 1000, 1950, 2000):
        store.insert_cache("model", prompt[:length], filled(model, prompt[:length]))
    # 500 goes back to 100 and 2000 to 1950, by trimming.
    assert stored(store) == [500, 1000, 2000]


def test_beginnings_with_a_snapshot_close_by_go(model: Model) -> None:
    store = LRUPromptCache()
    prompt = prompt_of(2000, 1)
    for length in (700, 1030, 1100, 2000):
        store.insert_cache("model", prompt[:length], filled(model, prompt[:length]))
    # The snapshot at 1024 is 6 tokens before 1030 and 76 before 1100; nothing is before 700.
    assert stored(store) == [700, 1100, 2000]


def test_bytes_and_sizes_add_up(model: Model) -> None:
    store = LRUPromptCache(max_size=3)
    for seed in range(5):
        for kind in ("system", "user", "assistant"):
            prompt = prompt_of(600 + 10 * seed, seed)
            store.insert_cache("model", prompt, filled(model, prompt), cache_type=kind)
            statistics = store.stats_by_type()
            assert len(store) == len(stored(store)) == min(3, seed + 1)
            assert store.nbytes == sum(s["n_bytes"] for s in statistics.values()) > 0
            assert len(store) == sum(s["n_sequences"] for s in statistics.values())
    store.trim_to(n_bytes=0)
    assert (len(store), store.nbytes) == (0, 0)
    small = LRUPromptCache(max_bytes=1)
    small.insert_cache("model", [1, 2], filled(model, [1, 2]))
    assert len(small) == 0


def test_a_draft_model_with_fewer_tokens_in_its_cache(model: Model) -> None:
    """Behind speculation the last draft token is not yet in the draft model's cache."""
    prompt = prompt_of(1000, 1)
    store = LRUPromptCache()
    cache = filled(model, prompt) + filled(ours(9), prompt[:-1])
    store.insert_cache("model", prompt, cache)
    for shared, held in ((980, 980), (1000, 999)):
        asked = [*prompt[:shared], 5, 6]
        found, rest = store.fetch_nearest_cache("model", asked)
        assert found is not None
        assert rest == asked[held:]
        assert [c.offset for c in found] == [held] * 4
        assert greedy(model, rest, 10, found[:2]) == greedy(model, asked, 10)


def test_other_models_are_left_to_mlx_lm() -> None:
    """mlx-lm's caches, and stores without any of ours, behave as if the plugin were not there."""

    def use() -> list[Any]:
        store = LRUPromptCache()
        caches = [KVCache(), KVCache()]
        for c in caches:
            c.update_and_fetch(mx.zeros((1, 1, 6, 4)), mx.zeros((1, 1, 6, 4)))
        seen: list[Any] = []
        for key in ([1, 2, 3], [1, 2, 3, 4, 5, 6]):
            store.insert_cache("model", key, caches)
            seen.append((stored(store), store.nbytes))
        for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 9], [1, 2, 3, 4, 5, 6, 7], [8]):
            found, rest = store.fetch_nearest_cache("model", tokens)
            seen.append((found and [c.offset for c in found], rest))
        return seen

    with_plugin = use()
    plugin.disable()
    assert use() == with_plugin


# Where snapshots are taken


def positions(cache: list[Any], sequence: int = 0) -> list[int]:
    (sliding,) = (c for c in cache if isinstance(c, SlidingKVCache))
    return [s.position for s in sliding.snapshots[sequence]]


@pytest.mark.parametrize("chunk", [40, 100, 512, 5000])
def test_snapshots_where_turns_begin(model: Model, chunk: int) -> None:
    """Also where a chunk begins with a turn; wherever chunks end, the positions are the same."""
    prompt = prompt_of(900, 1)
    for position in (0, 100, 250, 800):
        prompt[position] = 0
    cache = model.make_cache()
    for start in range(0, 900, chunk):
        model(mx.array([prompt[start : start + chunk]]), cache)
    assert positions(cache) == [100, 250, 800]


def test_snapshots_of_the_rows_of_a_padded_batch(model: Model) -> None:
    """Padding is the id 0 too, and begins no turn."""
    prompts = [prompt_of(n, n) for n in (300, 120, 450)]
    for prompt, position in zip(prompts, (200, 60, 440), strict=True):
        prompt[position] = 0
    generator = BatchGenerator(model, max_tokens=2)
    uids = generator.insert(prompts)
    found = {}
    while responses := generator.next_generated():
        found |= {r.uid: positions(r.prompt_cache) for r in responses if r.finish_reason}
    assert [found[uid] for uid in uids] == [[200], [60], [440]]


def test_snapshots_of_a_batch_of_equal_lengths(model: Model) -> None:
    prompts = np.array([prompt_of(80, 1), prompt_of(80, 2)])
    prompts[0, 30] = prompts[1, 50] = 0
    cache = model.make_cache()
    model(mx.array(prompts), cache)
    assert [positions(cache, i) for i in range(2)] == [[30], [50]]


def test_generated_tokens_get_no_snapshots(model: Model) -> None:
    cache = model.make_cache()
    greedy(model, prompt_of(1020, 1), 20, cache)
    assert cache[0].offset > 1030
    assert positions(cache) == []


def test_caches_that_are_taken_over_keep_snapshots_too(model: Model) -> None:
    cache = native().make_cache()
    native()(mx.array([prompt_of(1000, 1)]), cache)
    model(mx.array([[0, *prompt_of(50, 2)]]), cache)
    assert positions(cache) == [1000, 1024]


def test_no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK25_SNAPSHOTS", "off")
    model = build(WINDOW_512, random_weights(WINDOW_512))
    cache = model.make_cache()
    model(mx.array([[5, 0, *prompt_of(1100, 1)]]), cache)
    assert positions(cache) == []
