"""Faults that the parity checks must notice: each replaces one name of a module of `spark25_mlx`.

A mutation that no longer fits the model cannot pass unseen: a name that is gone raises, and a name that is no
longer called leaves the check green, which fails the mutation's test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from spark25_mlx.custom_kernels.rope import rope_turns
from tests.test_parity import check_chunks, check_decode, check_forward
from tests.tiny import F, S

Replacement = Callable[..., Any]
Check = partial[None]


@dataclass(frozen=True)
class Mutation:
    """A fault and the check that notices it.

    Attributes:
        target: dotted name inside the package, its module first.
        replacement: called in the target's place, with the original as its first argument.
        check: passes on the model as it is.
    """

    target: str
    replacement: Replacement
    check: Check

    @property
    def name(self) -> str:
        return self.replacement.__name__.replace("_", " ")

    @property
    def check_name(self) -> str:
        arguments = "-".join(str(argument) for argument in self.check.args)
        return f"{self.check.func.__name__}[{arguments}]"

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        replace(patch, self.target, self.replacement)


def replace(patch: pytest.MonkeyPatch, target: str, replacement: Replacement) -> None:
    """Put `replacement(original, ...)` in the place of a dotted name inside `spark25_mlx`."""
    module, *path, name = target.split(".")
    owner: Any = import_module(f"spark25_mlx.{module}")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    def mutated(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    patch.setattr(owner, name, mutated)


MUTATIONS: list[Mutation] = []


def mutation(target: str, check: Check) -> Callable[[Replacement], Replacement]:
    def add(replacement: Replacement) -> Replacement:
        MUTATIONS.append(Mutation(target, replacement, check))
        return replacement

    return add


# Rotary embedding


@mutation("model.rope_for", partial(check_forward, "base", 65))
def rope_classes_swapped(original: Replacement, args: Any, kind: str) -> Any:
    return original(args, {F: S, S: F}[kind])


@mutation("model.rope_for", partial(check_forward, "full_only", 65))
def frequency_divisor_head_dim(original: Replacement, args: Any, kind: str) -> Any:
    return rope_turns(args.rope[kind].theta, args.head_dim)[: args.rope[kind].dims // 2]


@mutation("model.rope_for", partial(check_forward, "full_only", 65))
def rope_on_all_dims_of_full_layers(original: Replacement, args: Any, kind: str) -> Any:
    return rope_turns(args.rope[kind].theta, args.head_dim)


@mutation("model.rope_for", partial(check_forward, "base", 65))
def theta_of_full_layers_1e6(original: Replacement, args: Any, kind: str) -> Any:
    return original(args, kind) if kind == S else rope_turns(1e6, args.rope[kind].dims)


@mutation("attention.qkv_rope", partial(check_forward, "base", 65))
def rotation_backwards(
    original: Replacement, qkv: mx.array, positions: mx.array, turns: mx.array, **heads: int
) -> Any:
    return original(qkv, positions, mx.zeros_like(turns) - turns, **heads)


@mutation("attention.qkv_rope", partial(check_chunks, "base", (40, 40)))
def positions_restart_in_each_chunk(
    original: Replacement, qkv: mx.array, positions: mx.array, turns: mx.array, **heads: int
) -> Any:
    return original(qkv, mx.zeros_like(positions), turns, **heads)


@mutation("attention.qkv_rope", partial(check_forward, "base", 65))
def rope_interleaved(
    original: Replacement, qkv: mx.array, positions: mx.array, turns: mx.array, **heads: int
) -> Any:
    dim, r = _head_dim(qkv, **heads), 2 * turns.size
    order = np.concatenate([np.arange(0, r, 2), np.arange(1, r, 2), np.arange(r, dim)])
    apart = qkv.reshape(*qkv.shape[:2], -1, dim)[..., mx.array(order)].reshape(qkv.shape)
    back = mx.array(np.argsort(order))
    return tuple(output[..., back] for output in original(apart, positions, turns, **heads))


@mutation("attention.qkv_rope", partial(check_forward, "base", 65))
def keys_not_rotated(
    original: Replacement, qkv: mx.array, positions: mx.array, turns: mx.array, **heads: int
) -> Any:
    q, _, v = original(qkv, positions, turns, **heads)
    return q, original(qkv, positions, mx.zeros_like(turns), **heads)[1], v


@mutation("attention.qkv_rope", partial(check_forward, "base", 65))
def values_rotated(original: Replacement, qkv: mx.array, *args: Any, **heads: int) -> Any:
    q, k, _ = original(qkv, *args, **heads)
    return q, k, original(_keys_and_values_swapped(qkv, **heads), *args, **heads)[1]


@mutation("attention.qkv_rope", partial(check_forward, "base", 65))
def keys_and_values_swapped(original: Replacement, qkv: mx.array, *args: Any, **heads: int) -> Any:
    return original(_keys_and_values_swapped(qkv, **heads), *args, **heads)


def _head_dim(qkv: mx.array, n_heads: int, n_kv_heads: int) -> int:
    return qkv.shape[-1] // (n_heads + 2 * n_kv_heads)


def _keys_and_values_swapped(qkv: mx.array, n_heads: int, n_kv_heads: int) -> mx.array:
    dim = _head_dim(qkv, n_heads, n_kv_heads)
    q, k, v = mx.split(qkv, [n_heads * dim, (n_heads + n_kv_heads) * dim], axis=-1)
    return mx.concatenate([q, v, k], axis=-1)


# Attention


def _with_window(heads: Any, change: int) -> Any:
    return dataclasses.replace(heads, window=heads.window and heads.window + change)


@mutation("attention._blocks", partial(check_forward, "base", 65))
def window_plus_one(original: Replacement, heads: Any, *args: Any) -> Any:
    return original(_with_window(heads, 1), *args)


@mutation("attention._blocks", partial(check_forward, "base", 65))
def window_minus_one(original: Replacement, heads: Any, *args: Any) -> Any:
    return original(_with_window(heads, -1), *args)


@mutation("attention._blocks", partial(check_forward, "window_512_two_periods", 513))
def window_plus_one_at_512(original: Replacement, heads: Any, *args: Any) -> Any:
    return original(_with_window(heads, 1), *args)


@mutation("attention._blocks", partial(check_forward, "full_only", 65))
def window_on_full_layers(original: Replacement, heads: Any, *args: Any) -> Any:
    return original(dataclasses.replace(heads, window=64), *args)


@mutation("attention._blocks", partial(check_forward, "base", 65))
def no_mask(original: Replacement, *args: Any) -> Any:
    return [dataclasses.replace(original(*args)[0], queries=slice(None), mask=None)]


@mutation("attention._blocks", partial(check_forward, "base", 200))
def blocks_start_one_key_late(original: Replacement, *args: Any) -> Any:
    return [
        dataclasses.replace(block, first_key=block.first_key + 1, mask=block.mask[..., 1:])
        if block.first_key
        else block
        for block in original(*args)
    ]


@mutation("model.Model.make_cache", partial(check_decode, "base", 60, 10))
def sliding_cache_one_slot_short(original: Replacement, self: Any) -> Any:
    whole, self.args = self.args, dataclasses.replace(self.args, sliding_window=self.args.sliding_window - 1)
    cache = original(self)
    self.args = whole
    return cache


@mutation("attention.scaled_dot_product_attention", partial(check_forward, "base", 65))
def scale_left_out(original: Replacement, *args: Any, scale: float, **rest: Any) -> Any:
    return original(*args, scale=1.0, **rest)


@mutation("attention.scaled_dot_product_attention", partial(check_forward, "gqa_6_2", 65))
def query_heads_dealt_round_robin(
    original: Replacement, q: mx.array, k: mx.array, *args: Any, **rest: Any
) -> mx.array:
    heads, kv_heads = q.shape[1], k.shape[1]
    order = np.arange(heads).reshape(heads // kv_heads, kv_heads).T.flatten()
    out = original(q[:, mx.array(order)], k, *args, **rest)
    return out[:, mx.array(np.argsort(order))]


# Gate


@mutation("model.Attention.__call__", partial(check_forward, "base", 65))
def gate_after_out_proj(original: Replacement, self: Any, *args: Any) -> mx.array:
    calls = []

    def keep(head_gate: Replacement, out: mx.array, scores: mx.array, *, mode: str) -> mx.array:
        calls.append(partial(head_gate, scores=scores, mode=mode))
        return _heads_side_by_side(out)

    with pytest.MonkeyPatch.context() as patch:
        replace(patch, "attention.head_gate", keep)
        y = original(self, *args)
    (gate,) = calls
    return gate(y.reshape(*y.shape[:2], self.heads.n_heads, -1).transpose(0, 2, 1, 3))


@mutation("model.Attention.__call__", partial(check_forward, "hidden_equals_heads", 65))
def gate_from_the_attention_output(original: Replacement, self: Any, *args: Any) -> mx.array:
    def own(head_gate: Replacement, out: mx.array, scores: mx.array, *, mode: str) -> mx.array:
        return head_gate(out, self.g_proj(_heads_side_by_side(out)), mode=mode)

    with pytest.MonkeyPatch.context() as patch:
        replace(patch, "attention.head_gate", own)
        return original(self, *args)


def _heads_side_by_side(out: mx.array) -> mx.array:
    return out.transpose(0, 2, 1, 3).flatten(-2)


@mutation("attention.head_gate", partial(check_forward, "base", 65))
def gate_silu_for_sigmoid(original: Replacement, x: mx.array, scores: mx.array, *, mode: str) -> mx.array:
    return original(x, scores, mode="silu")


@mutation("attention.head_gate", partial(check_forward, "silu_gate", 65))
def gate_sigmoid_for_silu(original: Replacement, x: mx.array, scores: mx.array, *, mode: str) -> mx.array:
    return original(x, scores, mode="sigmoid")


@mutation("attention.head_gate", partial(check_forward, "base", 65))
def gate_left_out(original: Replacement, x: mx.array, scores: mx.array, *, mode: str) -> mx.array:
    return _heads_side_by_side(x)


# MLP


@mutation("model.geglu", partial(check_forward, "base", 65))
def gelu_tanh(original: Replacement, *inputs: mx.array) -> mx.array:
    gate, up = _gate_and_up(*inputs)
    return nn.gelu_approx(gate) * up


@mutation("model.geglu", partial(check_forward, "base", 65))
def gelu_sigmoid(original: Replacement, *inputs: mx.array) -> mx.array:
    gate, up = _gate_and_up(*inputs)
    return nn.gelu_fast_approx(gate) * up


@mutation("model.geglu", partial(check_forward, "base", 65))
def gate_and_up_swapped(original: Replacement, *inputs: mx.array) -> mx.array:
    gate, up = _gate_and_up(*inputs)
    return original(up, gate)


def _gate_and_up(*inputs: mx.array) -> Any:
    return inputs if len(inputs) == 2 else mx.split(inputs[0], 2, axis=-1)


# Residual stream and norms


@mutation("model.add_rms_norm", partial(check_forward, "base", 65))
def residual_in_bf16(original: Replacement, residual: mx.array, *args: Any, eps: float) -> Any:
    h, x = original(residual, *args, eps=eps)
    return h.astype(mx.bfloat16).astype(mx.float32), x


@mutation("model.add_rms_norm", partial(check_forward, "base", 65))
def norm_of_the_residual_before_the_addition(
    original: Replacement, residual: mx.array, delta: mx.array | None, *args: Any, eps: float
) -> Any:
    return original(residual, delta, *args, eps=eps)[0], original(residual, None, *args, eps=eps)[1]


@mutation("model.add_rms_norm", partial(check_forward, "base", 65))
def norm_weight_plus_one(
    original: Replacement, residual: mx.array, delta: Any, weight: mx.array, *, eps: float
) -> Any:
    return original(residual, delta, 1.0 + weight, eps=eps)


@mutation("model.add_rms_norm", partial(check_forward, "large_epsilon", 65))
def epsilon_of_the_config_left_out(original: Replacement, *args: Any, eps: float) -> Any:
    return original(*args, eps=1e-6)


@mutation("model.add_rms_norm", partial(check_forward, "base", 65))
def embedding_scaled_by_sqrt_hidden(
    original: Replacement, residual: mx.array, delta: mx.array | None, *args: Any, eps: float
) -> Any:
    return original(
        residual * residual.shape[-1] ** 0.5 if delta is None else residual, delta, *args, eps=eps
    )
