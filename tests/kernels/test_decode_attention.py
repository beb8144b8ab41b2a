"""Attention of a few new tokens over a cache that they join, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from spark25_mlx.custom_kernels.decode_attention import decode_attention_reference
from spark25_mlx.custom_kernels.rope import rope_turns
from tests.kernels import test_head_gate, test_qkv_rope
from tests.kernels.rounding import DTYPES, random, to_float64

DecodeAttention = Callable[..., tuple[mx.array, mx.array, mx.array]]
IMPLEMENTATIONS = {"reference": decode_attention_reference}
THETA = 10_000.0
# Relative to the largest value: scores and probabilities of the reference may be rounded to the dtype.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 4e-3, mx.bfloat16: 3e-2}

implementations = pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def oracle(
    qkv: np.ndarray,
    scores: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: list[int],
    dims: int,
    n_heads: int,
    window: int | None,
    mode: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Head by head and token by token, with the key of position p in row p modulo the capacity.

    Returns:
        (out [B, L, n_heads * D], new keys buffer, new values buffer).
    """
    B, n_kv_heads, capacity, D = keys.shape
    L = qkv.shape[1]
    q, k, v = test_qkv_rope.oracle(qkv, positions, THETA, dims, n_heads, n_kv_heads)
    keys, values = (
        test_qkv_rope.append_oracle(buffer, new, positions, [L] * B)
        for buffer, new in ((keys, k), (values, v))
    )
    out = np.empty((B, n_heads, L, D))
    for b, start in enumerate(positions):
        for i in range(L):
            first = 0 if window is None else max(0, start + i - window + 1)
            rows = [p % capacity for p in range(first, start + i + 1)]
            for h in range(n_heads):
                kv = h // (n_heads // n_kv_heads)
                weights = keys[b, kv, rows] @ q[b, h, i] / math.sqrt(D)
                weights = np.exp(weights - weights.max())
                out[b, h, i] = weights / weights.sum() @ values[b, kv, rows]
    return test_head_gate.oracle(out, scores, mode), keys, values


@implementations
@dtypes
@pytest.mark.parametrize("mode", ["sigmoid", "silu"])
@pytest.mark.parametrize(
    ("L", "n_heads", "n_kv_heads", "D", "dims", "capacity", "window", "positions"),
    [
        (1, 16, 4, 256, 64, 20, None, [19]),  # a full layer of the 4B, its last free row
        (1, 16, 4, 256, 256, 8, 8, [29]),  # a ring that has wrapped, its window exactly full
        (1, 2, 1, 32, 8, 4, None, [0]),  # nothing cached
        (1, 4, 1, 32, 32, 16, 9, [0, 8, 9, 40]),  # up to, at and past the window
        (8, 4, 1, 32, 8, 40, None, [0, 17, 32]),
        (8, 6, 2, 64, 64, 16, 9, [3, 5, 100]),  # 8 tokens in a ring with just the room that they need
        (3, 3, 3, 48, 12, 12, 1, [0, 30]),  # a window of the token itself
    ],
)
def test_random_values(
    run: DecodeAttention,
    dtype: mx.Dtype,
    mode: str,
    L: int,
    n_heads: int,
    n_kv_heads: int,
    D: int,
    dims: int,
    capacity: int,
    window: int | None,
    positions: list[int],
) -> None:
    B = len(positions)
    qkv = random((B, L, (n_heads + 2 * n_kv_heads) * D), dtype, 0, scale=1.5)
    scores = random((B, L, n_heads), dtype, 1, scale=2.0)
    keys, values = (random((B, n_kv_heads, capacity, D), dtype, seed, scale=1.5) for seed in (2, 3))
    wide = [to_float64(x) for x in (qkv, scores, keys, values)]
    exact = oracle(wide[0], wide[1], wide[2], wide[3], positions, dims, n_heads, window, mode)
    options = {"n_heads": n_heads, "window": window, "mode": mode}
    start = mx.array(positions, dtype=mx.int32)
    actual = run(qkv, scores, keys, values, start, rope_turns(THETA, dims), **options)
    assert actual[0].dtype == dtype
    for tensor, wanted in zip(actual, exact, strict=True):
        assert tensor.shape == wanted.shape
        assert np.abs(to_float64(tensor) - wanted).max() <= TOLERANCE[dtype] * np.abs(wanted).max()
