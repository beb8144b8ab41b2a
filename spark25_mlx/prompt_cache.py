"""Prompt caches of whole conversations: files, and what mlx-lm's `LRUPromptCache` does with them.

A file holds mlx-lm's own classes wherever they can say the same, so that it loads with or without this
package; the model takes such caches over on its first call. Snapshots are not kept in a file.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache, QuantizedKVCache, RotatingKVCache

from .cache import FullKVCache, LayerCache, QuantizedFullKVCache, SlidingKVCache, rewind_to
from .checkpoint import check_safetensors

# An entry is dropped for one that extends it and that can go back to within so many tokens of its end.
_NEAR = 32


def is_ours(cache: Sequence[Any]) -> bool:
    """Whether any layer's cache is one of this package's."""
    return any(isinstance(c, LayerCache) for c in cache)


# Files.


def to_native(cache: Any) -> Any:
    """mlx-lm's cache with the same tokens, for a cache of this package; others are returned as they are.

    So are a batch, a turbo cache, which mlx-lm has no class for, and a sliding cache that holds fewer keys
    than mlx-lm's class needs, as right behind a restored snapshot.
    """
    if not isinstance(cache, LayerCache) or len(cache.offsets) != 1:
        return cache
    offset = cache.offsets[0]
    buffers, _, *more = cache.state
    keys: Any = None
    values: Any = None
    match cache:
        case FullKVCache():
            keys, values = buffers or (None, None)
            return KVCache.from_state((keys, values, offset))
        case QuantizedFullKVCache():
            if buffers is not None:
                keys, values = tuple(buffers[:3]), tuple(buffers[3:])
            return QuantizedKVCache.from_state((keys, values, offset, *more))
        case SlidingKVCache(window=window, slack=slack):
            first = max(int(more[0].item()), offset - window - slack)
            if offset - first < min(offset, window):
                return cache
            rows = mx.array([p % (window + slack) for p in range(first, offset)], dtype=mx.int32)
            if buffers is not None:
                keys, values = (mx.take(x, rows, axis=2) for x in buffers)
            return RotatingKVCache.from_state((keys, values, offset, 0, window, offset - first))
    return cache


def save(original: Callable[..., None], file_name: str, cache: list[Any], metadata: Any = None) -> None:
    """As mlx-lm's `save_prompt_cache`, but an interruption leaves an earlier file of the name whole."""
    # What mx.save_safetensors makes of a name.
    target = Path(file_name if str(file_name).endswith(".safetensors") else f"{file_name}.safetensors")
    unfinished = target.with_name(f".{target.stem}.{os.getpid()}.safetensors")
    try:
        original(str(unfinished), [to_native(c) for c in cache], metadata)
        os.replace(unfinished, target)
    except RuntimeError as error:
        raise OSError(f"{target} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def load(original: Callable[..., Any], file_name: str, return_metadata: bool = False) -> Any:
    """As mlx-lm's `load_prompt_cache`, with errors that name the file.

    Raises:
        ValueError: the file is damaged, or is no prompt cache.
        FileNotFoundError: there is none.
    """
    file = Path(file_name)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; mlx_lm.cache_prompt makes prompt cache files")
    check_safetensors(file)
    try:
        return original(file_name, return_metadata=return_metadata)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is no prompt cache that can be read here ({reason})") from error


# mlx-lm's store of conversations. Its keys are (model key, tokens); its values have the fields below.


def fetch(
    original: Callable[..., Any], store: LRUPromptCache, model: Any, tokens: list[int]
) -> tuple[list[Any] | None, list[int]]:
    """A copy of the stored cache that saves most of a prompt, and the tokens that are left to compute.

    Every stored cache goes back as far as it must: by trimming, or to a snapshot. At least one token is left.
    """
    stored = [(key, _entry(store, model, key)) for key in _keys(store, model)]
    if not any(is_ours(entry.prompt_cache) for _, entry in stored):
        return original(store, model, tokens)
    best: list[Any] | None = None
    most = 0
    for key, entry in stored:
        position = min(_common(key, tokens), len(tokens) - 1)
        if position <= most:
            continue
        candidate = copy.deepcopy(entry.prompt_cache)
        reached = _go_back(candidate, position)
        if reached > most:
            best, most = candidate, reached
    return best, tokens[most:]


def insert(
    original: Callable[..., None],
    store: LRUPromptCache,
    model: Any,
    tokens: list[int],
    prompt_cache: list[Any],
    *,
    cache_type: str = "assistant",
) -> None:
    """Store a cache, and drop those of its beginnings to which it can go back itself.

    mlx-lm drops all beginnings of a cache that can be trimmed at all. A ring can be trimmed only so far: a
    beginning stays if going back to it would leave more than a few tokens to compute.
    """
    if not is_ours(prompt_cache):
        return original(store, model, tokens, prompt_cache, cache_type=cache_type)
    beginnings = [k for k in _keys(store, model) if len(k) < len(tokens) and tokens[: len(k)] == k]
    for key in beginnings:
        if len(key) - _go_back(copy.deepcopy(prompt_cache), len(key)) <= _NEAR:
            _drop(store, model, key)
    entry = store.CacheEntry(prompt_cache, sum(c.nbytes for c in prompt_cache), cache_type)
    if tokens in _keys(store, model):
        _drop(store, model, tokens)
    store._trie.add(model, tokens, entry)
    store._lru.push(model, tokens, cache_type)
    _count(store, entry, 1)
    store.trim_to(n_sequences=store.max_size, n_bytes=store.max_bytes)


def _keys(store: LRUPromptCache, model: Any) -> list[list[int]]:
    return [key for queue in store._lru._lrus.values() for owner, key in queue if owner == model]


def _entry(store: LRUPromptCache, model: Any, key: list[int]) -> Any:
    return store._trie.get(model, key)


def _drop(store: LRUPromptCache, model: Any, key: list[int]) -> None:
    _count(store, store._trie.pop(model, key), -1)
    store._lru.remove(model, key)


def _count(store: LRUPromptCache, entry: Any, sign: int) -> None:
    store._n_bytes += sign * entry.nbytes
    store._n_bytes_by_type[entry.cache_type] += sign * entry.nbytes


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two sequences have in common at their beginnings."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _go_back(cache: list[Any], position: int) -> int:
    """Make a cache go back to a position, or to the nearest earlier one that it can, and return that.

    A draft model's caches, behind the model's own, may hold a few tokens fewer or be of another class. 0 when
    nothing is left; the cache is then of no use.
    """
    groups: dict[int, list[Any]] = {}
    for c in cache:
        groups.setdefault(c.offsets[0] if isinstance(c, LayerCache) else c.offset, []).append(c)
    reached = min(position, *groups)
    for _ in groups:
        for group in groups.values():
            reached = min(reached, _group_back(group, reached))
    return reached


def _group_back(group: list[Any], position: int) -> int:
    ours = [c for c in group if isinstance(c, LayerCache)]
    others = [c for c in group if not isinstance(c, LayerCache)]
    reached = rewind_to(ours, position) if ours else position
    if any(c.offset > reached and not c.is_trimmable() for c in others):
        return 0
    for c in others:
        c.trim(c.offset - reached)
    return reached


def accepts(store_class: type) -> bool:
    """Whether mlx-lm's store has the parts that `insert` and `fetch` work with, tried with a stand-in."""

    class Layer(FullKVCache):
        nbytes = 3

    def no_original(*_: Any, **__: Any) -> None:
        raise AssertionError

    store: Any = store_class(max_size=2)
    for key in ([1, 2], [1, 3], [1, 3], [4]):
        insert(no_original, store, "model", key, [Layer()])
    kinds = store.stats_by_type()
    counted = sum(kind["n_bytes"] for kind in kinds.values())
    stored = sorted(map(tuple, _keys(store, "model"))) == [(1, 3), (4,)]
    return stored and (len(store), store.nbytes, counted) == (2, 6, 6)
