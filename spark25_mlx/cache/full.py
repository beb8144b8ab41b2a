"""Cache of a layer that attends to all earlier tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .storage import LayerCache, put_rows

if TYPE_CHECKING:
    from .quantized import QuantizedFullKVCache
    from .turbo import TurboFullKVCache


class GrowingKVCache(LayerCache):
    """What a cache of all tokens does, however it stores them: buffers that grow, row = position."""

    def mask(self, length: int) -> mx.array | str | None:
        """For each of the next `length` queries, which of the keys that `append` will return it sees.

        Returns:
            None (all), "causal" (query i sees all but the last length - 1 - i keys), or bool [B, 1, length,
            n].
        """
        if len(set(self.offsets)) == 1:
            return None if length == 1 else "causal"
        queries = mx.array(self.offsets)[:, None, None, None] + mx.arange(length)[:, None]
        return mx.arange(max(self.offsets) + length) <= queries

    def _store(self, rows: list[mx.array], valid: list[int]) -> list[mx.array]:
        length = rows[0].shape[2]
        buffers = self._values()
        # Padding lands beyond the end of its sequence, where the next tokens replace it.
        if len(set(self.offsets)) == 1:
            self._buffers = [put_rows(x, new, self.offsets[0]) for x, new in zip(buffers, rows, strict=True)]
        else:
            positions = mx.array(self.offsets)[:, None] + mx.arange(length)
            where = positions[:, None, :, None]
            self._buffers = [
                mx.put_along_axis(x, where, new, axis=2) for x, new in zip(buffers, rows, strict=True)
            ]
        return [buffer[:, :, : max(self.offsets) + length] for buffer in self._buffers]

    def can_trim(self, n: int) -> bool:
        return n >= 0

    def _encode_all(self, full: FullKVCache) -> None:
        """Take over the tokens of a cache that is not quantised."""
        for name in self._PER_SEQUENCE:
            setattr(self, name, list(getattr(full, name)))
        tokens = max(full.offsets)
        if tokens:
            keys, values = (x[:, :, :tokens] for x in full._values())
            self._buffers = self._encode(keys, values)

    def _hold(self, buffers: list[mx.array], tokens: int) -> None:
        """Take over other buffers' first rows."""
        self._shared = True
        self._buffers = [mx.contiguous(x[:, :, :tokens]) for x in buffers] if tokens else []
        self.offsets = [tokens] * len(self.offsets)


class FullKVCache(GrowingKVCache):
    """All keys and values of a layer: buffers [B, KV, capacity, D]."""

    def to_quantized(self, group_size: int = 64, bits: int = 8) -> QuantizedFullKVCache | TurboFullKVCache:
        """A cache with the same tokens in the format of `quantized_cache`; this one does not change.

        Raises:
            ValueError: group_size, bits or the head_dim is not possible, or there is no such format.
        """
        from .quantized import quantized_cache

        cache = quantized_cache(group_size, bits)
        cache._encode_all(self)
        return cache

    @classmethod
    def from_native(cls, native: Any) -> FullKVCache:
        """The contents of an mlx-lm `KVCache`."""
        keys, values, offset = native.state
        cache = cls()
        if keys is not None:
            cache._repeat(keys.shape[0])
            cache._hold([keys, values], offset)
        return cache
