"""A whole model's caches: going back in all layers, or in none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .full import FullKVCache
from .quantized import QuantizedFullKVCache
from .sliding import SlidingKVCache
from .storage import LayerCache


def can_trim(cache: Sequence[Any], n: int) -> bool:
    """Whether every layer can go back n tokens exactly.

    Layers that cannot tell for a number, such as mlx-lm's own, answer `is_trimmable()`.
    """
    return all(c.can_trim(n) if isinstance(c, LayerCache) else c.is_trimmable() for c in cache)


def trim(cache: Sequence[Any], n: int) -> int:
    """Take the last n tokens off all layers.

    Returns:
        Tokens taken off: n, or all if there are fewer.

    Raises:
        ValueError: a layer cannot go back that far; nothing has changed.
    """
    if n < 0:
        raise ValueError(f"cannot trim {n} tokens; the number must not be negative")
    for i, c in enumerate(cache):
        if not can_trim([c], n):
            reason = c.trim_error(n) if isinstance(c, LayerCache) else f"cannot trim {n} tokens"
            raise ValueError(f"layer {i}: {reason}; nothing has been trimmed")
    return min((c.trim(n) for c in cache), default=0)


def rewind_to(cache: Sequence[LayerCache], position: int) -> int:
    """Go back to `position`, or to the nearest earlier position that all layers can restore.

    By trimming if possible, else by the snapshots that the sliding layers keep, else to the beginning. The
    caller computes tokens[reached:] again.

    Args:
        cache: all layers' caches, of one sequence.
        position: tokens to keep.

    Returns:
        reached: tokens that are kept, 0 <= reached <= position.

    Raises:
        ValueError: the position is beyond the end, or the caches are not of one sequence and one length.
    """
    offset = _offset(cache)
    if not 0 <= position <= offset:
        raise ValueError(f"cannot rewind to position {position} of {offset} tokens")
    if can_trim(cache, offset - position):
        trim(cache, offset - position)
        return position
    sliding = [c for c in cache if isinstance(c, SlidingKVCache)]
    common = set.intersection(*({s.position for s in c.snapshots[0]} for c in sliding))
    reached = max((p for p in common if p <= position), default=0)
    for c in cache:
        if reached and isinstance(c, SlidingKVCache):
            c.restore(next(s for s in c.snapshots[0] if s.position == reached))
        else:
            c.trim(offset - reached)
    return reached


def adopt(cache: Sequence[Any], window: int, slack: int = 64) -> list[LayerCache]:
    """This package's caches with the contents of mlx-lm's own, for prompt cache files that mlx-lm made.

    Args:
        cache: `KVCache`, `QuantizedKVCache`, `RotatingKVCache`, or caches of this package, which stay as they
            are.
        window: of the sliding layers.
        slack: of the sliding layers that are converted.

    Raises:
        ValueError: a layer has another class, or holds too little for the window.
    """
    return [_adopt(i, c, window, slack) for i, c in enumerate(cache)]


def _adopt(layer: int, cache: Any, window: int, slack: int) -> LayerCache:
    if isinstance(cache, SlidingKVCache) and cache.window != window:
        raise ValueError(f"layer {layer}: the cache has window {cache.window}, the model {window}")
    if isinstance(cache, LayerCache):
        return cache
    # By name: mlx-lm need not be loaded for this.
    match type(cache).__name__:
        case "KVCache":
            return FullKVCache.from_native(cache)
        case "QuantizedKVCache":
            return QuantizedFullKVCache.from_native(cache)
        case "RotatingKVCache":
            return SlidingKVCache.from_native(cache, window, slack)
        case name:
            raise ValueError(f"layer {layer}: cannot convert a {name}; only mlx-lm's caches of one sequence")


def _offset(cache: Sequence[LayerCache]) -> int:
    offsets = {tuple(c.offsets) for c in cache}
    if len(offsets) != 1:
        raise ValueError(f"the layers' caches hold {sorted(offsets)} tokens; all must hold the same")
    (sequences,) = offsets
    if len(sequences) != 1:
        raise ValueError(f"cannot rewind a batch of {len(sequences)} sequences; extract one first")
    return sequences[0]
