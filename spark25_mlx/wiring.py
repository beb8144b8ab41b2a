"""What mlx-lm's functions do differently while the plugin is enabled.

Each function here has the signature of the one that it stands in for, behind the original itself, and leaves
to the original whatever is not about this package's caches and models. `plugin` checks and `connect`s.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from . import checkpoint
from . import prompt_cache as stored
from .cache import CACHE_CLASSES, SlidingKVCache, trim
from .model import Model

_CACHE = "mlx_lm.models.cache"


def trim_prompt_cache(original: Callable[..., Any], cache: list[Any], num_tokens: int) -> int:
    """All layers go back exactly, or a ValueError says why not and nothing has changed."""
    return trim(cache, num_tokens) if stored.is_ours(cache) else original(cache, num_tokens)


def speculative_generate_step(
    original: Callable[..., Any],
    prompt: Any,
    model: Any,
    draft_model: Any,
    *args: Any,
    num_draft_tokens: int = 2,
    prompt_cache: list[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Refuse, before anything runs, more draft tokens than the rings can take back."""
    if isinstance(model, Model) or isinstance(draft_model, Model):
        if prompt_cache is None:
            make = import_module(_CACHE).make_prompt_cache
            prompt_cache = make(model) + make(draft_model)
        n = len(model.layers)
        if len(prompt_cache) != n + len(draft_model.layers):
            raise ValueError(
                f"the prompt cache has {len(prompt_cache)} layers; model and draft model have {n} and "
                f"{len(draft_model.layers)}"
            )
        parts = ((model, prompt_cache[:n]), (draft_model, prompt_cache[n:]))
        adopted = [
            c for owner, part in parts for c in (owner.adopt(part) if isinstance(owner, Model) else part)
        ]
        slack = min((c.slack for c in adopted if isinstance(c, SlidingKVCache)), default=None)
        if slack is not None and num_draft_tokens > slack:
            raise ValueError(
                f"--num-draft-tokens is {num_draft_tokens}; the sliding layers' caches, with slack {slack}, "
                f"cannot take back more than {slack}"
            )
        prompt_cache[:] = adopted
    return original(
        prompt,
        model,
        draft_model,
        *args,
        num_draft_tokens=num_draft_tokens,
        prompt_cache=prompt_cache,
        **kwargs,
    )


def load_model(original: Callable[..., Any], model_path: Any, *args: Any, **kwargs: Any) -> Any:
    """Look at the files first."""
    checkpoint.check_folder(Path(model_path))
    return original(model_path, *args, **kwargs)


# (module, class or "", name) -> what stands in for it and the parameters that it must have.
STAND_INS: dict[tuple[str, str, str], tuple[Callable[..., Any], tuple[str, ...]]] = {
    (_CACHE, "", "trim_prompt_cache"): (trim_prompt_cache, ("cache", "num_tokens")),
    (_CACHE, "", "save_prompt_cache"): (stored.save, ("file_name", "cache", "metadata")),
    (_CACHE, "", "load_prompt_cache"): (stored.load, ("file_name", "return_metadata")),
    (_CACHE, "LRUPromptCache", "fetch_nearest_cache"): (stored.fetch, ("self", "model", "tokens")),
    (_CACHE, "LRUPromptCache", "insert_cache"): (
        stored.insert,
        ("self", "model", "tokens", "prompt_cache", "cache_type"),
    ),
    ("mlx_lm.generate", "", "speculative_generate_step"): (
        speculative_generate_step,
        ("prompt", "model", "draft_model", "num_draft_tokens", "prompt_cache"),
    ),
    ("mlx_lm.utils", "", "load_model"): (load_model, ("model_path",)),
}

# Stand-in -> the original.
_originals: dict[Callable[..., Any], Callable[..., Any]] = {}


def changed() -> str | None:
    """The first function that is not as its stand-in needs it, in words; None when all are."""
    for (module, owner, name), (_, needed) in STAND_INS.items():
        where = ".".join(filter(None, (module, owner, name)))
        function = getattr(import_module(module), owner or name, None)
        if owner and function is not None:
            function = getattr(function, name, None)
        if function is None:
            return f"{where} does not exist"
        have = inspect.signature(function).parameters
        if missing := [parameter for parameter in needed if parameter not in have]:
            return f"{where} has no parameter {missing[0]}"
    try:
        accepted = stored.accepts(import_module(_CACHE).LRUPromptCache)
    except Exception:  # in whatever way it fails, it is not the store that we know
        accepted = False
    return None if accepted else f"{_CACHE}.LRUPromptCache does not store caches as it did"


def connect() -> None:
    """Put the stand-ins in place, in all modules of mlx-lm that have the names already; twice is as once."""
    home = import_module(_CACHE)
    for cls in CACHE_CLASSES:
        setattr(home, cls.__name__, cls)
    for (module, owner, name), (stand_in, _) in STAND_INS.items():
        if owner:
            holder = getattr(import_module(module), owner)
            setattr(holder, name, _wrapped(vars(holder)[name], stand_in))
            continue
        import_module(module)
        for loaded in _modules():
            function = vars(loaded).get(name)
            if inspect.isfunction(function) and _home(function) == module:
                setattr(loaded, name, _wrapped(function, stand_in))


def disconnect() -> None:
    """Undo `connect`."""
    home = sys.modules.get(_CACHE)
    for cls in CACHE_CLASSES:
        if getattr(home, cls.__name__, None) is cls:
            delattr(home, cls.__name__)
    for module, owner, name in STAND_INS:
        holders = [getattr(sys.modules.get(module), owner, None)] if owner else _modules()
        for holder in holders:
            function = getattr(holder, name, None)
            if inspect.isfunction(function) and function in _originals:
                setattr(holder, name, _originals[function])
    _originals.clear()


def _wrapped(original: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    if original in _originals:
        return original
    for known, its_original in _originals.items():
        if its_original is original:
            return known

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return stand_in(original, *args, **kwargs)

    _originals[wrapper] = original
    return wrapper


def _modules() -> Iterator[ModuleType]:
    """mlx-lm's modules that are loaded, and the program itself, which may be one or hold names of theirs."""
    for name, module in list(sys.modules.items()):
        if (name == "__main__" or name.split(".")[0] == "mlx_lm") and isinstance(module, ModuleType):
            yield module


def _home(function: Callable[..., Any]) -> str:
    """The module that a function belongs to, also when `python -m` has given it another name."""
    if function.__module__ == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        return getattr(spec, "name", "__main__")
    return function.__module__
