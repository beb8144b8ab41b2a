"""Cache of rotated rows of a layer that attends to all earlier tokens."""

from __future__ import annotations

import mlx.core as mx

from ..custom_kernels.turbo import BITS, HEAD_DIMS, TURBO, turbo_dequantize, turbo_quantize
from .full import GrowingKVCache
from .storage import KV

# Tokens that are encoded at once: the fp32 values on the way take many times their room.
_TOKENS = 8192


class TurboFullKVCache(GrowingKVCache):
    """All keys and values of a layer, with keys and values in the format of `custom_kernels.turbo`.

    Keys and values are each a pair: codes uint32 [B, KV, capacity, D / 8], and scales [B, KV, capacity, 1] in
    the dtype of the keys. `reserve` returns two such pairs; `append` returns what they stand for, and decodes
    all each time. So does a decode step where no kernel reads the codes: in fp32, and with heads of 32.
    """

    # No `bits`, which mlx-lm takes for the sign of its own format.
    kv_format = TURBO
    _LEAST_ROWS = 8

    def _encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        for name, x in (("keys", keys), ("values", values)):
            if x.shape[-1] not in HEAD_DIMS:
                raise ValueError(
                    f"head_dim of the {name} is {x.shape[-1]}; turbo rows have one of {HEAD_DIMS} "
                    "(SPARK25_KV_FORMAT=affine takes others)"
                )
        return [*_quantized(keys), *_quantized(values)]

    def _decode(self, arrays: list[mx.array]) -> KV:
        return tuple(arrays[:2]), tuple(arrays[2:])

    def _seen(self, arrays: list[mx.array]) -> KV:
        keys, values = (
            turbo_dequantize(codes, scales, dtype=scales.dtype) for codes, scales in self._decode(arrays)
        )
        return keys, values

    def _layout(self) -> tuple[int, int, mx.Dtype]:
        codes, scales = self._buffers[:2]
        return codes.shape[1], codes.shape[3] * 32 // BITS, scales.dtype


def _quantized(x: mx.array) -> list[mx.array]:
    pieces = []
    for start in range(0, x.shape[2], _TOKENS):
        pieces.append(turbo_quantize(x[:, :, start : start + _TOKENS]))
        if x.shape[2] > _TOKENS:
            # MLX would have the intermediate results of all of them at once.
            mx.eval(pieces[-1])
    return [mx.concatenate(list(part), axis=2) for part in zip(*pieces, strict=True)]
