"""Quantised cache of a layer that attends to all earlier tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx

from ..custom_kernels import turbo
from .full import GrowingKVCache
from .storage import KV
from .turbo import TurboFullKVCache

VARIABLE = "SPARK25_KV_FORMAT"
_AFFINE, _TURBO = "affine", "turbo"
_BITS = (4, 8)
_GROUP_SIZES = (32, 64, 128)


class QuantizedFullKVCache(GrowingKVCache):
    """All keys and values of a layer, with keys and values in the affine format of `mx.quantize`.

    Keys and values are each a triple: packed uint32 [B, KV, capacity, D * bits / 32], and scales and biases
    [B, KV, capacity, D / group_size] in the dtype of the keys. `append` and `reserve` return two such
    triples.

    Args:
        group_size: elements that share a scale and a bias: 32, 64 or 128.
        bits: of an element: 4 or 8.
    """

    _KIND: ClassVar[tuple[str, ...]] = ("group_size", "bits")
    _LEAST_ROWS = 8

    def __init__(self, group_size: int = 64, bits: int = 8) -> None:
        if bits not in _BITS:
            raise ValueError(f"bits is {bits}; a quantised cache has {' or '.join(map(str, _BITS))}")
        if group_size not in _GROUP_SIZES:
            raise ValueError(f"group_size is {group_size}; it must be one of {_GROUP_SIZES}")
        super().__init__()
        self.group_size = group_size
        self.bits = bits

    @property
    def kv_format(self) -> tuple[int, int]:  # type: ignore[override]
        return self.bits, self.group_size

    def _encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        for name, x in (("keys", keys), ("values", values)):
            if x.shape[-1] % self.group_size:
                raise ValueError(
                    f"head_dim of the {name} is {x.shape[-1]}, not a multiple of group_size {self.group_size}"
                )
        quantize = partial(mx.quantize, group_size=self.group_size, bits=self.bits)
        return [*quantize(keys), *quantize(values)]

    def _decode(self, arrays: list[mx.array]) -> KV:
        return tuple(arrays[:3]), tuple(arrays[3:])

    def _layout(self) -> tuple[int, int, mx.Dtype]:
        scales = self._buffers[1]
        return scales.shape[1], scales.shape[3] * self.group_size, scales.dtype

    def _more_state(self) -> tuple[Any, ...]:
        return self.group_size, self.bits

    def _set_more_state(self, more: Sequence[Any]) -> None:
        self.group_size, self.bits = more

    @classmethod
    def from_native(cls, native: Any) -> QuantizedFullKVCache:
        """The contents of an mlx-lm `QuantizedKVCache`."""
        keys, values, offset, group_size, bits = native.state
        cache = cls(group_size, bits)
        if keys is not None:
            cache._repeat(keys[0].shape[0])
            cache._hold([*keys, *values], offset)
        return cache


def quantized_cache(group_size: int = 64, bits: int = 8) -> QuantizedFullKVCache | TurboFullKVCache:
    """An empty cache in the format that SPARK25_KV_FORMAT names, "affine" if none.

    Args:
        group_size: of affine rows; those of turbo have one scale.
        bits: of an element: 4 or 8, for turbo 4.

    Raises:
        ValueError: group_size or bits is not possible, or there is no such format.
    """
    affine = QuantizedFullKVCache(group_size, bits)
    chosen = os.environ.get(VARIABLE, "").strip().lower() or _AFFINE
    if chosen == _AFFINE:
        return affine
    if chosen != _TURBO:
        raise ValueError(f"{VARIABLE} is {chosen!r}; it must be {_AFFINE} or {_TURBO}")
    if bits != turbo.BITS:
        raise ValueError(
            f"{VARIABLE}={_TURBO} has {turbo.BITS} bits a value, and {bits} are asked for; "
            f"use --kv-bits {turbo.BITS} or {VARIABLE}={_AFFINE}"
        )
    return TurboFullKVCache()
