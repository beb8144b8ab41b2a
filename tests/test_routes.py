"""The whole model on the kernels, in the simulator: every route gives what the mx-op route gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from spark25_mlx.cache import FullKVCache
from spark25_mlx.custom_kernels import backend
from spark25_mlx.model import Model
from tests import metal_sim
from tests.kernels.backends import CACHE_BUFFERS, kernel_of
from tests.metal_sim.requirements import require_toolchain
from tests.tiny import build, random_tokens, random_weights, tiny_config

CONFIG = tiny_config(
    hidden_size=256, intermediate_size=256, head_dim=64, num_key_value_heads=2, sliding_window=16
)
PROMPT = 21
STEPS = 20


@contextmanager
def simulated(name: str) -> Iterator[set[str]]:
    """Kernels run in the simulator as if on this backend; yields the names of those that are launched."""
    require_toolchain()
    launched: set[str] = set()

    def factory(**kernel: Any) -> Any:
        launch = metal_sim.metal_kernel(**kernel)

        def run(**arguments: Any) -> list[mx.array]:
            launched.add(kernel_of(kernel["name"]))
            return launch(**arguments)

        return run

    with backend.forced(name, factory), metal_sim.options(writable=CACHE_BUFFERS):
        yield launched


def run(model: Model, tokens: np.ndarray, chunks: list[int], cache: list[Any] | None = None) -> np.ndarray:
    """Logits of all positions, computed in chunks through the caches."""
    cache, outputs, at = cache or model.make_cache(), [], 0
    for n in chunks:
        outputs.append(model(mx.array(tokens[:, at : at + n]), cache=cache))
        mx.eval(outputs[-1])
        at += n
    return np.array(mx.concatenate(outputs, axis=1).astype(mx.float32))


def models(bits: int = 16, **changes: Any) -> Model:
    config = CONFIG | changes
    model = build(config, random_weights(config))
    model.eval()
    if bits < 16:
        nn.quantize(
            model, group_size=64, bits=bits, class_predicate=lambda path, module: _plain(path, module)
        )
    return model


def _plain(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and not path.endswith("g_proj")


FUSED = {"norm_qkv", "decode_attention_final", "linear_add", "norm_geglu", "rope_table"}
SEPARATE = {"add_rms_norm", "qkv_rope", "head_gate", "geglu", "decode_attention_final", "rope_table"}


@pytest.mark.parametrize(
    ("name", "bits", "expected"),
    [
        ("cuda", 16, FUSED | SEPARATE),
        ("cuda", 8, {f"{kernel}_quantised" for kernel in ("norm_qkv", "linear_add", "norm_geglu")}),
        ("cuda", 4, {f"{kernel}_quantised" for kernel in ("norm_qkv", "linear_add", "norm_geglu")}),
        ("metal", 16, SEPARATE),
    ],
)
def test_decoding_one_by_one(name: str, bits: int, expected: set[str]) -> None:
    """Prefill past the window, then single tokens over a second wrap."""
    model = models(bits)
    tokens = random_tokens(CONFIG, PROMPT + STEPS)
    chunks = [PROMPT, *[1] * STEPS]
    reference = run(model, tokens, chunks)
    with simulated(name) as launched:
        ours = run(model, tokens, chunks)
    assert expected <= launched
    np.testing.assert_allclose(ours, reference, atol=3e-4 * np.abs(reference).max())


@pytest.mark.parametrize("name", ["cuda", "metal"])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_caches(name: str, bits: int) -> None:
    """The full layers' rows are read and written as codes; a text and its steps are as by values."""
    model = models()
    tokens = random_tokens(CONFIG, PROMPT + 14)
    chunks = [PROMPT, *[1] * 6, 3, 1, 4]

    def quantised() -> list[Any]:
        cache = model.make_cache()
        return [c.to_quantized(32, bits) if isinstance(c, FullKVCache) else c for c in cache]

    reference = run(model, tokens, chunks, quantised())
    cache = quantised()
    with simulated(name) as launched:
        ours = run(model, tokens, chunks, cache)
    assert {"decode_attention_quantised", "merge_gate"} <= launched
    # A code may be another where phases in the table differ in the last digit.
    np.testing.assert_allclose(ours, reference, atol=(5e-3 if bits == 8 else 3e-2) * np.abs(reference).max())
    assert all(c.offset == tokens.shape[1] for c in cache)


@pytest.mark.parametrize(
    ("name", "kv_format", "bits", "kernels"),
    [
        ("cuda", "affine", 8, {"decode_attention_matrix", "merge_gate"}),
        ("cuda", "affine", 4, {"decode_attention_matrix", "merge_gate"}),
        ("metal", "affine", 8, {"decode_attention_quantised", "merge_gate"}),
        ("cuda", "turbo", 4, {"decode_attention_turbo", "merge_gate_turbo"}),
        ("metal", "turbo", 4, {"decode_attention_turbo", "merge_gate_turbo"}),
    ],
)
def test_quantised_caches_of_half_precision(
    name: str, kv_format: str, bits: int, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the test above; rotated rows are a format for these only."""
    monkeypatch.setenv("SPARK25_KV_FORMAT", kv_format)
    model = build(CONFIG, random_weights(CONFIG), mx.float16)
    model.eval()
    tokens = random_tokens(CONFIG, PROMPT + 14)
    chunks = [PROMPT, *[1] * 6, 3, 1, 4]
    caches = [
        [c.to_quantized(64, bits) if isinstance(c, FullKVCache) else c for c in model.make_cache()]
        for _ in range(2)
    ]
    reference = run(model, tokens, chunks, caches[0])
    with simulated(name) as launched:
        ours = run(model, tokens, chunks, caches[1])
    assert kernels <= launched
    np.testing.assert_allclose(ours, reference, atol=(1e-2 if bits == 8 else 3e-2) * np.abs(reference).max())
    assert all(c.offset == tokens.shape[1] for c in caches[1])


@pytest.mark.parametrize("name", ["cuda", "metal"])
def test_generate_step(name: str) -> None:
    """mlx-lm's loop, whose caches are quantised on the way, gives the same logits for the same tokens."""
    model = models()
    prompt = mx.array(random_tokens(CONFIG, PROMPT)[0])

    def steps(tokens: list[int] | None) -> tuple[list[int], np.ndarray]:
        """Greedy, or along given tokens; the loop's own log-probabilities."""
        forced = iter(tokens or [])
        sampler = (lambda x: mx.array([next(forced)])) if tokens else None
        loop = generate_step(
            prompt, model, max_tokens=12, sampler=sampler, kv_bits=8, kv_group_size=32, quantized_kv_start=27
        )
        out, logprobs = zip(*loop, strict=True)
        return [int(token) for token in out], np.array(mx.stack(logprobs))

    tokens, reference = steps(None)
    with simulated(name) as launched:
        _, ours = steps([*tokens, tokens[-1]])
    assert {"decode_attention_final", "decode_attention_quantised"} <= launched
    np.testing.assert_allclose(ours, reference, atol=5e-3 * np.abs(reference).max())


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_several_tokens_at_a_time(gate: str) -> None:
    """Steps of 1 to 8 tokens, as speculative decoding verifies them, from an empty cache on."""
    model = models(gate_attn_act_mode=gate)
    chunks = [1, 3, 8, 2, 5, 8, 4]
    tokens = random_tokens(CONFIG, sum(chunks))
    reference = run(model, tokens, chunks)
    with simulated("metal") as launched:
        ours = run(model, tokens, chunks)
    assert "decode_attention_final" in launched
    np.testing.assert_allclose(ours, reference, atol=3e-4 * np.abs(reference).max())


def test_without_the_attention_kernel() -> None:
    """The append kernel writes in place and MLX attends."""
    model = models()
    tokens = random_tokens(CONFIG, PROMPT + STEPS)
    chunks = [PROMPT, *[1] * STEPS]
    reference = run(model, tokens, chunks)
    with simulated("metal") as launched, backend.without("decode_attention", "decode_attention_final"):
        ours = run(model, tokens, chunks)
    assert "qkv_rope_append" in launched
    assert "decode_attention_final" not in launched
    np.testing.assert_allclose(ours, reference, atol=3e-4 * np.abs(reference).max())


def test_batch_from_an_empty_cache_without_the_attention_kernel() -> None:
    """A fresh cache learns the number of sequences from the first tokens."""
    model = models()
    chunks = [4, 1, 1, 3]
    tokens = random_tokens(CONFIG, sum(chunks), batch=3)
    reference = run(model, tokens, chunks)
    with simulated("metal") as launched, backend.without("decode_attention", "decode_attention_final"):
        ours = run(model, tokens, chunks)
    assert "qkv_rope_append" in launched
    np.testing.assert_allclose(ours, reference, atol=3e-4 * np.abs(reference).max())


def test_ragged_batch() -> None:
    """Rows of different lengths, merged as mlx-lm's batches are, decode as they do alone."""
    model = models()
    lengths = [5, 16, 33]
    tokens = random_tokens(CONFIG, max(lengths) + STEPS, batch=len(lengths))
    rows = [tokens[i : i + 1, : n + STEPS] for i, n in enumerate(lengths)]
    alone = [run(model, row, [row.shape[1] - STEPS, *[1] * STEPS])[:, -STEPS:] for row in rows]
    with simulated("metal") as launched:
        caches = []
        for row, n in zip(rows, lengths, strict=True):
            caches.append(model.make_cache())
            mx.eval(model(mx.array(row[:, :n]), cache=caches[-1]))
        merged = [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]
        steps = [
            model(
                mx.array(np.stack([row[0, n + t : n + t + 1] for row, n in zip(rows, lengths, strict=True)])),
                cache=merged,
            )
            for t in range(STEPS)
        ]
        together = np.array(mx.concatenate(steps, axis=1))
    assert "decode_attention_final" in launched
    np.testing.assert_allclose(together, np.concatenate(alone), atol=3e-4 * np.abs(together).max())


def test_changed_weights_are_used_at_once() -> None:
    """Prepared launches hold arrays; a step with other weights prepares others."""
    model = models()
    tokens = random_tokens(CONFIG, 8)
    with simulated("cuda"):
        run(model, tokens, [4, 1, 1, 1, 1])
        model.layers[1].self_attn.out_proj.weight = 2 * model.layers[1].self_attn.out_proj.weight
        model.layers[2].mlp.down_proj = nn.Linear(256, 256, bias=False)
        model.model.layers[3] = build(CONFIG, random_weights(CONFIG, seed=7)).layers[3]
        ours = run(model, tokens, [4, 1, 1, 1, 1])
    reference = run(model, tokens, [4, 1, 1, 1, 1])
    np.testing.assert_allclose(ours, reference, atol=3e-4 * np.abs(reference).max())
