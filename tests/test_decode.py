"""What a `Decoder` does around the kernels: which steps are its own, what they wait for, how they compile."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

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


def test_compiled_from_the_second_call_on() -> None:
    """The first may evaluate; one more traces; later ones do without Python."""
    calls = 0

    def function(x: mx.array, positions: mx.array, after: mx.array, buffers: Any) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 1:
            mx.eval(x)
        return x + positions + buffers[0][1][2]

    step = decode._compiled_later(function, [])
    one, triple = mx.array([1.0]), (mx.zeros(1), mx.zeros(1), mx.array([5.0]))
    results = [step(one, mx.array([i]), one, [(one, triple)]).item() for i in range(4)]
    assert results == [6.0, 7.0, 8.0, 9.0]
    assert calls == 2


def test_traces_of_freed_functions_are_not_taken_for_others() -> None:
    """MLX keeps them, in every thread but the one that frees, under an address that is soon used again."""
    one = mx.array([1.0])

    def step_of(number: float) -> Any:
        constant = mx.array([number])
        mx.eval(constant)
        return decode._compiled_later(lambda x, *_: x + constant, [])

    def third_call(step: Any) -> float:
        return [step(one, one, one, []) for _ in range(3)][-1].item()

    with ThreadPoolExecutor(1) as other:
        for number in range(20):
            step = step_of(float(number))
            assert [third_call(step), other.submit(third_call, step).result()] == [number + 1.0] * 2
            del step


def test_which_models_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace would keep an adapter's scale, which may change."""
    model = models()
    monkeypatch.setattr(decode, "is_on", lambda *_: True)
    monkeypatch.setattr(decode, "_prepare", lambda *_: None)
    assert decode.Decoder(model.model)._compiles
    model.layers[0].self_attn.q_k_v_proj = LoRALinear.from_base(model.layers[0].self_attn.q_k_v_proj)
    assert not decode.Decoder(model.model)._compiles


def test_changes_that_are_noticed() -> None:
    model = models()
    for change in (
        lambda: setattr(model.layers[1].mlp.down_proj, "weight", mx.zeros((256, 256))),
        lambda: setattr(model.layers[1].mlp.down_proj, "bias", mx.zeros(256)),
        lambda: model.layers[1].mlp.down_proj.pop("bias"),
        lambda: model.layers.__setitem__(0, models().layers[0]),
        lambda: setattr(model.model, "layers", list(model.layers)),
        lambda: model.layers.pop(),
    ):
        decoder = decode.Decoder(model.model)
        assert decoder.is_current()
        change()
        assert not decoder.is_current()


def test_replaced_decoders_are_freed_at_once() -> None:
    """And the old weights with them, without the garbage collector."""
    model = models()
    gc.disable()
    try:
        with simulated("cuda"):
            run(model, random_tokens(CONFIG, 3), [1, 1, 1])
            old = weakref.ref(model.model._decoder)
            model.layers[0].mlp.down_proj.weight = 2 * model.layers[0].mlp.down_proj.weight
            run(model, random_tokens(CONFIG, 1), [1])
        assert old() is None
    finally:
        gc.enable()


def test_copies_of_a_model_prepare_their_own() -> None:
    model = models()
    with simulated("cuda"):
        run(model, random_tokens(CONFIG, 2), [1, 1])
        twin = copy.deepcopy(model)
    assert model.model._decoder is not None and twin.model._decoder is None


def test_few_functions_are_kept() -> None:
    recent: dict[int, int] = {}
    for i in range(100):
        decode._put(recent, i, i)
    assert list(recent) == list(range(100 - decode._MOST_KEPT, 100))


@pytest.mark.parametrize("norms", [True, False])
def test_dtypes_that_differ(norms: bool) -> None:
    """Queries have the dtype that weights and norms make together, whatever that of the embeddings is."""
    model = models()
    model.set_dtype(mx.bfloat16)
    tokens = random_tokens(CONFIG, 24)
    if norms:
        for layer in model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight = norm.weight.astype(mx.float32)
    else:
        model.model.embedding.weight = model.model.embedding.weight.astype(mx.float32)
    chunks = [20, 1, 1, 2]
    reference = run(model, tokens, chunks)
    with simulated("cuda") as launched:
        ours = run(model, tokens, chunks)
    assert "decode_attention_final" in launched
    assert ("norm_qkv" in launched) == (not norms)
    np.testing.assert_allclose(ours, reference, atol=3e-2 * np.abs(reference).max())


@pytest.mark.parametrize("name", ["cuda", "metal"])
@pytest.mark.parametrize("chunks", [[1, 1], [4, 1, 3], [9, 1]])
def test_batch_from_an_empty_cache(name: str, chunks: list[int]) -> None:
    """A fresh cache learns the number of sequences from the first tokens."""
    model = models()
    tokens = random_tokens(CONFIG, sum(chunks), batch=3)
    reference = run(model, tokens, chunks)
    with simulated(name):
        ours = run(model, tokens, chunks)
    np.testing.assert_allclose(ours, reference, atol=3e-4 * np.abs(reference).max())


def test_caches_of_another_dtype_are_refused() -> None:
    """A kernel would write its own kind of numbers into them."""
    model = models()
    cache = model.make_cache()
    with simulated("metal"):
        mx.eval(model(mx.ones((1, 3), mx.int32), cache=cache))
        model.set_dtype(mx.bfloat16)
        with pytest.raises(ValueError, match=r"the cache holds .*float32\).* not .*bfloat16"):
            model(mx.ones((1, 1), mx.int32), cache=cache)


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
    assert not [name for name, _ in launches if name.startswith("decode_attention")]


def test_every_layer_waits_for_the_last_step() -> None:
    """One output stands for all layers, and every kernel that writes in place binds it."""
    model = models()
    cache = model.make_cache()
    with recorded() as launches:
        model(mx.array([[1]]), cache=cache)
        (last,) = {id(layer.last): layer.last for layer in cache}.values()
        launches.clear()
        model(mx.array([[1]]), cache=cache)
    writers = [inputs for name, inputs in launches if name.startswith("decode_attention")]
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
