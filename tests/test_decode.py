"""What a `Decoder` does around the kernels: which steps are its own, what they wait for, how they compile."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx import decode
from spark25_mlx.cache import FullKVCache, LayerCache, SlidingKVCache
from spark25_mlx.model import Model
from tests.kernels.backends import recorded
from tests.test_routes import CONFIG, models, run, simulated
from tests.tiny import random_tokens


def caches(model: Model, slack: int) -> list[LayerCache]:
    return [
        SlidingKVCache(CONFIG["sliding_window"], slack) if isinstance(cache, SlidingKVCache) else cache
        for cache in model.make_cache()
    ]


def test_compiled_from_the_second_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may evaluate; one more traces; later ones do without Python."""
    monkeypatch.setattr(decode, "is_on", lambda *_: True)
    calls = 0

    def function(x: mx.array, positions: mx.array, after: mx.array, buffers: Any) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 1:
            mx.eval(x)
        return x + positions + buffers[0][1][2]

    step = decode._compiled_later(function)
    one, triple = mx.array([1.0]), (mx.zeros(1), mx.zeros(1), mx.array([5.0]))
    results = [step(one, mx.array([i]), one, [(one, triple)]).item() for i in range(4)]
    assert results == [6.0, 7.0, 8.0, 9.0]
    assert calls == 2


def test_not_compiled_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "is_on", lambda *_: False)
    assert decode._compiled_later(max) is max


def test_slack_decides_anew_for_other_caches() -> None:
    """Four tokens fit a ring with slack, and would overwrite keys in use in one without."""
    model = models()
    tokens = random_tokens(CONFIG, 40)
    chunks = [28, 4, 4, 4]
    reference = run(model, tokens, chunks)
    with simulated("metal") as launched:
        roomy = run(model, tokens, chunks, caches(model, 64))
        assert "decode_attention_final" in launched
        tight = run(model, tokens, chunks, caches(model, 0))
    for ours in (roomy, tight):
        np.testing.assert_allclose(ours, reference, atol=3e-4 * np.abs(reference).max())


def test_padded_batches_go_another_way() -> None:
    """Tokens beyond `lengths` are not written, which the attention kernel would do."""
    model = models()
    cache = model.make_cache()
    for layer in cache:
        layer.prepare(lengths=[3, 1])
    with recorded() as launches:
        model(mx.ones((2, 3), mx.int32), cache=cache)
    assert not [name for name, _ in launches if name.startswith("spark25_decode_attention")]


def test_every_layer_waits_for_the_last_step() -> None:
    """One output stands for all layers, and every kernel that writes in place binds it."""
    model = models()
    cache = model.make_cache()
    with recorded() as launches:
        model(mx.array([[1]]), cache=cache)
        (last,) = {id(layer.last): layer.last for layer in cache}.values()
        launches.clear()
        model(mx.array([[1]]), cache=cache)
    writers = [inputs for name, inputs in launches if name.startswith("spark25_decode_attention")]
    assert len(writers) == len(cache)
    assert all(any(x is last for x in inputs) for inputs in writers)


def test_layers_with_different_last_writes_are_waited_for() -> None:
    """Then nothing is pending, and the next step orders itself after nothing."""
    evaluated = [mx.zeros(1), mx.zeros(1)]
    pair: list[LayerCache] = [FullKVCache(), FullKVCache()]
    for layer, last in zip(pair, evaluated, strict=True):
        layer.reserve(1, shape=(1, 1, 32), dtype=mx.float32)
        layer.commit(1, last)
    assert decode._last_of(pair) is None
    assert [layer.last for layer in pair] == [None, None]
    pair[0].commit(1, evaluated[0])
    assert decode._last_of(pair) is evaluated[0]
