"""Timed decoding and prefill, the memory-bandwidth wall, and the operations of a step's graph."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .bench_models import PREFILL_STEP

# Untimed steps in front of every timed run: kernels compile, buffers grow, the device speeds up.
WARMUP_STEPS = 8
WALL = "x + 1 on a float32 array, every byte read and written, 8 times in a row; best of 5"


@dataclass
class DecodeRun:
    """Seconds of each token of one run, in parts, and the run's peak memory in bytes.

    Attributes:
        build: Python makes the step's graph.
        submit: `mx.async_eval` takes it.
        wait: until the token before is there.
    """

    build: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    peak: int = 0

    @property
    def total(self) -> list[float]:
        return [sum(parts) for parts in zip(self.build, self.submit, self.wait, strict=True)]


@dataclass
class PrefillRun:
    """Seconds from the prompt to the first token, and the peak memory in bytes."""

    total: list[float]
    peak: int


def _step(model: nn.Module, cache: list[Any], y: mx.array) -> tuple[mx.array, mx.array]:
    """The next token of each sequence [B] and the log-probabilities [B, vocab_size]."""
    logits = model(y[:, None], cache=cache)[:, -1, :]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logprobs, axis=-1), logprobs


def decode(model: nn.Module, cache: list[Any], batch: int, tokens: int) -> DecodeRun:
    """Greedy decoding as mlx-lm does it: a step is submitted before the token of the step before is read."""
    run = DecodeRun()
    y, logprobs = _step(model, cache, mx.ones((batch,), mx.int32))
    mx.async_eval(y, logprobs)
    for i in range(-WARMUP_STEPS, tokens):
        if i == 0:
            mx.reset_peak_memory()
        start = perf_counter()
        next_y, logprobs = _step(model, cache, y)
        built = perf_counter()
        mx.async_eval(next_y, logprobs)
        submitted = perf_counter()
        y.tolist()
        done = perf_counter()
        y = next_y
        if i >= 0:
            run.build.append(built - start)
            run.submit.append(submitted - built)
            run.wait.append(done - submitted)
    mx.eval(y)
    run.peak = mx.get_peak_memory()
    return run


def prefill(model: nn.Module, cache: list[Any], prompt: mx.array) -> PrefillRun:
    """Forward passes of 2048 tokens and one of the last token, as mlx-lm does it.

    Args:
        cache: empty.
        prompt: ids [B, L].
    """
    mx.reset_peak_memory()
    last = prompt.shape[1] - 1
    start = perf_counter()
    for i in range(0, last, PREFILL_STEP):
        model(prompt[:, i : min(i + PREFILL_STEP, last)], cache=cache)
        mx.eval([c.state for c in cache])
        mx.clear_cache()
    mx.eval(_step(model, cache, prompt[:, last]))
    return PrefillRun([perf_counter() - start], mx.get_peak_memory())


def operations(model: nn.Module, cache: list[Any], batch: int) -> Counter[str]:
    """Operations of a decode step's graph: name -> how many. The cache takes in two tokens."""
    y, _ = _step(model, cache, mx.ones((batch,), mx.int32))
    mx.eval(y)
    y, logprobs = _step(model, cache, y)
    text = io.StringIO()
    mx.export_to_dot(text, y, logprobs)
    mx.eval(y, logprobs)
    return Counter(re.findall(r'\[label ="([^"]*)", shape=rectangle\]', text.getvalue()))


def memory_bandwidth(nbytes: int) -> float:
    """Bytes a second that the device reads and writes, by WALL, with an array of `nbytes`."""
    x = mx.zeros((nbytes // 4,), mx.float32)
    mx.eval(x)
    passes, best = 8, float("inf")
    for _ in range(5):
        start = perf_counter()
        for _ in range(passes):
            x = x + 1
        mx.eval(x)
        best = min(best, perf_counter() - start)
    return 2 * nbytes * passes / best


def random_prompt(vocab_size: int, batch: int, length: int) -> mx.array:
    """Ids [B, L] without 0, the family's BOS."""
    return mx.random.randint(1, vocab_size, (batch, length), key=mx.random.key(1)).astype(mx.int32)


def pooled(runs: Sequence[DecodeRun | PrefillRun]) -> list[float]:
    """The samples of all runs in seconds."""
    return [seconds for run in runs for seconds in run.total]
