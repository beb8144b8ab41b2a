"""The Spark block as `mlx.nn` modules, with the numerics of the reference (the family's Hugging Face code).

With W the dtype of the weights and f fp32, a forward pass is

1.  h = f(E[ids]); the residual stream h stays fp32 through all layers.
2.  norm(h) = W(w h rsqrt(mean(h^2) + eps)), in fp32, before the attention and again before the MLP.
3.  x = norm(h); [q | k | v] = x W_qkvᵀ, heads contiguous; s = x W_gᵀ, one score a head.
4.  Rotary embedding of q and k, half-split within the leading r dimensions of a head: angles
    position * theta^(-2j/r), fp32. Full layers rotate a part of the head, sliding layers all of it.
5.  o = softmax(q kᵀ / sqrt(head_dim)) v, softmax in fp32, query heads grouped onto KV heads.
6.  A query sees the keys up to its own position; in a sliding layer only those with query - key < window.
7.  o[head] = o[head] a(s[head]), a = sigmoid or a(s) = s sigmoid(s), in fp32.
8.  h = h + f(o W_outᵀ); then h = h + f(MLP(norm(h))).
9.  MLP(x) = W_down(GELU(W_gate x) W_up x) with the exact GELU(z) = z (1 + erf(z / sqrt 2)) / 2, in fp32.
10. logits = norm(h) Eᵀ, or by an untied head.

Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from .attention import Heads, Step, gated_attention, plan
from .cache import FullKVCache, LayerCache, SlidingKVCache, SnapshotPolicy, adopt, for_batch
from .config import SLIDING, ModelArgs
from .custom_kernels.add_rms_norm import add_rms_norm
from .custom_kernels.backend import REFERENCE, backend_name, differentiable
from .custom_kernels.decode_attention import MAX_TOKENS
from .custom_kernels.geglu import geglu
from .custom_kernels.rope import rope_turns
from .decode import Decoder
from .joined import JoinedLinear
from .snapshots import AutoSnapshots
from .weights import WeightsError, check, rename


def rope_for(args: ModelArgs, layer_type: str) -> mx.array:
    """Rotary frequencies of a layer class, as `rope_turns` gives them: uint64 [r / 2]."""
    rope = args.rope[layer_type]
    return rope_turns(rope.theta, rope.dims)


class Attention(nn.Module):
    """Grouped-query attention with a fused QKV projection and a gate per head."""

    def __init__(self, args: ModelArgs, layer_type: str) -> None:
        super().__init__()
        self.heads = Heads(
            n_heads=args.num_attention_heads,
            n_kv_heads=args.num_key_value_heads,
            head_dim=args.head_dim,
            window=args.sliding_window if layer_type == SLIDING else None,
            turns=rope_for(args, layer_type),
            gate_mode=args.gate_attn_act_mode,
        )
        bias = args.attention_bias
        self.q_k_v_proj = nn.Linear(args.hidden_size, args.q_size + 2 * args.kv_size, bias=bias)
        self.g_proj = nn.Linear(args.hidden_size, args.num_attention_heads, bias=bias)
        self.out_proj = nn.Linear(args.q_size, args.hidden_size, bias=bias)

    def __call__(self, x: mx.array, step: Step, cache: LayerCache | None = None) -> mx.array:
        out = gated_attention(self.q_k_v_proj(x), self.g_proj(x), self.heads, step, cache)
        return self.out_proj(out)


class MLP(nn.Module):
    """down(GELU(gate x) * up x), with the exact GELU."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=args.mlp_bias)
        self.up_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=args.mlp_bias)
        self.down_proj = nn.Linear(args.intermediate_size, args.hidden_size, bias=args.mlp_bias)
        self._joined: JoinedLinear | None = None

    def __call__(self, x: mx.array) -> mx.array:
        joined = None if self.training else self._joined
        if joined is not None and joined.stands_for(self.gate_proj, self.up_proj):
            return self.down_proj(geglu(joined(x)))
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))

    def join(self) -> None:
        """From now on compute gate and up in one matrix product, if they are of one format."""
        self._joined = JoinedLinear.of(self.gate_proj, self.up_proj)


class DecoderLayer(nn.Module):
    """One block. It takes and returns the residual stream beside the last sublayer's output, which is not yet
    added, so that every addition is made together with the norm that follows it."""

    def __init__(self, args: ModelArgs, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.self_attn = Attention(args, layer_type)
        self.mlp = MLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(
        self, residual: mx.array, delta: mx.array | None, step: Step, cache: LayerCache | None = None
    ) -> tuple[mx.array, mx.array]:
        residual, x = _add_norm(residual, delta, self.input_layernorm)
        residual, x = _add_norm(residual, self.self_attn(x, step, cache), self.post_attention_layernorm)
        return residual, self.mlp(x)

    def qkv_dtype(self) -> mx.Dtype:
        """Dtype of queries, keys and values."""
        weight = self.input_layernorm.weight
        return self.self_attn.q_k_v_proj(mx.zeros((1, 1, weight.size), weight.dtype)).dtype


def _add_norm(residual: mx.array, delta: mx.array | None, norm: nn.RMSNorm) -> tuple[mx.array, mx.array]:
    return add_rms_norm(residual, delta, norm.weight, eps=norm.eps)


class SparkModel(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, layer_type) for layer_type in args.layer_types]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self._decoder: Decoder | None = None
        # The first layer of each class answers for it: all layers of a class are at the same position.
        self._representatives = {kind: args.layer_types.index(kind) for kind in args.rope}

    def __call__(
        self,
        inputs: mx.array,
        cache: list[LayerCache] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        x = self.embedding(inputs) if input_embeddings is None else input_embeddings
        B, L, _ = x.shape
        if cache is not None and L <= MAX_TOKENS and not self.training and backend_name() != REFERENCE:
            out = self._current_decoder()(x, cache)
            if out is not None:
                return out
        caches: Sequence[LayerCache | None] = cache or [None] * len(self.layers)
        positions = mx.array(for_batch([0] if cache is None else cache[0].offsets, B), dtype=mx.int32)
        steps = {
            kind: plan(self.layers[i].self_attn.heads, caches[i], positions, L, self.layers[i].qkv_dtype())
            for kind, i in self._representatives.items()
        }
        residual, delta = x.astype(mx.float32), None
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            residual, delta = layer(residual, delta, steps[layer.layer_type], layer_cache)
        return _add_norm(residual, delta, self.norm)[1]

    def _current_decoder(self) -> Decoder:
        if self._decoder is None or not self._decoder.is_current():
            self._decoder = Decoder(self)
        return self._decoder


class Model(nn.Module):
    """Causal language model, in the form that mlx-lm loads and drives.

    Attributes:
        snapshots: where the caches that it makes keep snapshots by themselves, as SPARK25_SNAPSHOTS says;
            None for nowhere.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = SparkModel(args)
        self.snapshots = AutoSnapshots.from_environment()
        self._last_was_step = False
        if args.tie_word_embeddings is False:
            self._untie()

    def _untie(self) -> None:
        self.lm_head = nn.Linear(self.args.hidden_size, self.args.vocab_size, bias=False)

    def __call__(
        self,
        inputs: mx.array,
        cache: list[LayerCache] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Logits of every position.

        Args:
            inputs: token ids [B, L]; not read when `input_embeddings` is given.
            cache: one cache a layer, as `make_cache` makes them, updated by the call; None for a plain
                forward.
            input_embeddings: [B, L, hidden_size].

        Returns:
            [B, L, vocab_size] in the dtype of the weights.

        Raises:
            ValueError: the prompt is empty, or holds an id outside the vocabulary.
        """
        if input_embeddings is None:
            self._check_ids(inputs)
        if cache is not None and not all(isinstance(c, LayerCache) for c in cache):
            cache[:] = self.adopt(cache)
        if cache is not None and input_embeddings is None and inputs.shape[-1] > MAX_TOKENS:
            self._mark_snapshots(inputs, cache)
        # Only a forward pass without a cache is ever differentiated.
        with differentiable() if cache is None or self.training else nullcontext():
            x = self.model(inputs, cache, input_embeddings)
        return self.lm_head(x) if "lm_head" in self else self.model.embedding.as_linear(x)

    def _check_ids(self, inputs: mx.array) -> None:
        """Look at the ids of every prompt; a GPU need not wait for those that it has just sampled itself."""
        if inputs.size == 0:
            raise ValueError("the prompt is empty; it must hold at least one token")
        is_step = inputs.shape[-1] <= MAX_TOKENS
        # The last token of a prompt comes alone, after the others: the first short call is checked too.
        trusted = is_step and self._last_was_step and mx.default_device().type == mx.DeviceType.gpu
        self._last_was_step = is_step
        if self.training or trusted:
            return
        low, high = (int(bound) for bound in np.array(mx.stack([mx.min(inputs), mx.max(inputs)])))
        if low < 0 or high >= self.args.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token id {bad} is out of range; the vocabulary has {self.args.vocab_size} ids")

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], bool]:
        """Quantise everything but the gates: tiny matrices whose error would scale whole heads."""
        return lambda path, _: not path.endswith("self_attn.g_proj")

    def make_cache(self) -> list[LayerCache]:
        """An empty cache for each layer."""
        policy = self._snapshot_policy()
        return [
            SlidingKVCache(self.args.sliding_window, policy=policy)
            if layer.layer_type == SLIDING
            else FullKVCache()
            for layer in self.layers
        ]

    def adopt(self, cache: Sequence[Any]) -> list[LayerCache]:
        """Caches as `make_cache` makes them, with the contents of mlx-lm's own; see `cache.adopt`."""
        adopted = adopt(cache, self.args.sliding_window)
        for layer in adopted:
            if isinstance(layer, SlidingKVCache) and layer.policy is None:
                layer.policy = self._snapshot_policy()
        return adopted

    def _snapshot_policy(self) -> SnapshotPolicy | None:
        layers = self.args.layer_types.count(SLIDING)
        return self.snapshots.of_layer(layers) if self.snapshots is not None and layers else None

    def _mark_snapshots(self, inputs: mx.array, cache: list[LayerCache]) -> None:
        """Have snapshots taken of a piece of a prompt [B, L], whose ids the host has seen already."""
        sliding = [c for c in cache if isinstance(c, SlidingKVCache) and c.policy is not None]
        if self.snapshots is None or not sliding:
            return
        B, L = inputs.shape
        starts, valid = (for_batch(x, B) for x in (sliding[0].offsets, sliding[0].valid(L)))
        rows = zip(np.array(inputs), starts, valid, strict=True)
        marks = [self.snapshots.positions(ids[:n], start) for ids, start, n in rows]
        for c in sliding:
            c.mark(marks)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Checkpoint tensors under this model's names; see `weights.rename`.

        A config that does not say whether the head is tied leaves it to the checkpoint: an `lm_head` there
        unties it.
        """
        weights = rename(weights)
        if self.args.tie_word_embeddings is None and "lm_head.weight" in weights:
            self._untie()
        if "lm_head" not in self:
            weights = {name: value for name, value in weights.items() if not name.startswith("lm_head.")}
        return weights

    def load_weights(
        self, file_or_weights: str | list[tuple[str, mx.array]], strict: bool = True
    ) -> nn.Module:
        """As `nn.Module.load_weights`, with errors of one line that name the tensors."""
        weights = file_or_weights
        if isinstance(weights, str):
            loaded = mx.load(weights)
            if not isinstance(loaded, dict):
                raise WeightsError(
                    f"{weights} holds no named tensors; it must be a .safetensors or .npz file"
                )
            weights = list(loaded.items())
        if strict:
            check(dict(weights), dict(tree_flatten(self.parameters())))
        super().load_weights(weights, strict=strict)
        for layer in self.layers:
            layer.mlp.join()
        return self
