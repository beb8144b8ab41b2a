"""Checkpoint tensors to the model's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlx.core as mx

# Names that third parties' conversions use, and the published ones.
_RENAMES = {"embed_tokens": "embedding", "o_proj": "out_proj"}


class WeightsError(ValueError):
    """Tensors of a checkpoint that do not fit the model."""


def rename(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Published tensor names for those of third parties (`.scales` and `.biases` of quantised ones included),
    without the rotary frequencies that some conversions store.

    Raises:
        WeightsError: a tensor is there under both of its names.
    """
    renamed: dict[str, mx.array] = {}
    for name, value in weights.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        published = ".".join(_RENAMES.get(part, part) for part in name.split("."))
        if published in renamed or (published != name and published in weights):
            raise WeightsError(f"checkpoint: {name} and {published} are the same tensor; keep one of them")
        renamed[published] = value
    return renamed


def check(weights: Mapping[str, mx.array], expected: Mapping[str, mx.array]) -> None:
    """Compare names and shapes with the model's own parameters.

    Raises:
        WeightsError: names the first tensors that are missing, not known, or of another shape.
    """
    if missing := sorted(expected.keys() - weights.keys()):
        raise WeightsError(f"checkpoint: {_count(missing, 'is missing', 'are missing')}: {_some(missing)}")
    if extra := sorted(weights.keys() - expected.keys()):
        raise WeightsError(
            f"checkpoint: {_count(extra, 'does', 'do')} not belong to this model: {_some(extra)}"
        )
    wrong = [
        f"{name} has shape {list(weights[name].shape)}, the config asks for {list(value.shape)}"
        for name, value in sorted(expected.items())
        if weights[name].shape != value.shape
    ]
    if wrong:
        raise WeightsError(f"checkpoint: {_some(wrong, separator='; ')}")


def _count(names: list[str], one: str, many: str) -> str:
    return f"1 tensor {one}" if len(names) == 1 else f"{len(names)} tensors {many}"


def _some(names: Iterable[str], separator: str = ", ") -> str:
    first, *rest = names
    shown = [first, *rest[:2]]
    return separator.join(shown) + (f" and {len(rest) - 2} more" if len(rest) > 2 else "")
