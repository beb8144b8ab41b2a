"""Two linear layers with one input, computed as one matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

_ARRAYS = ("weight", "scales", "biases", "bias")


@dataclass(frozen=True)
class JoinedLinear:
    """[first(x) | second(x)]. The two layers keep their parameters, as views of the joined ones.

    Layers that were replaced or changed since, by quantising, adapters, training or loading, are not what was
    joined: `stands_for` tells.
    """

    layers: tuple[nn.Module, nn.Module]
    joined: nn.Module
    views: tuple[dict[str, mx.array], dict[str, mx.array]]

    @classmethod
    def of(cls, first: nn.Module, second: nn.Module) -> JoinedLinear | None:
        """Join two plain or two equally quantised layers; None for any others (adapters, mixed formats)."""
        kind = type(first)
        if kind is not type(second) or kind not in (nn.Linear, nn.QuantizedLinear):
            return None
        if first.keys() != second.keys() or any(
            getattr(first, name, None) != getattr(second, name, None)
            for name in ("bits", "group_size", "mode")
        ):
            return None
        names = [name for name in _ARRAYS if name in first]
        if any(first[n].shape[1:] != second[n].shape[1:] or first[n].dtype != second[n].dtype for n in names):
            return None
        joined = kind.__new__(kind)
        nn.Module.__init__(joined)
        vars(joined).update(vars(first))
        joined.update({key: value for key, value in first.items() if key not in names}, strict=False)
        rows = first.weight.shape[0]
        views: tuple[dict[str, mx.array], dict[str, mx.array]] = ({}, {})
        for name in names:
            whole = mx.concatenate([first[name], second[name]])
            joined[name] = whole
            first[name] = views[0][name] = whole[:rows]
            second[name] = views[1][name] = whole[rows:]
        return cls((first, second), joined, views)

    def stands_for(self, first: nn.Module, second: nn.Module) -> bool:
        """Whether these are the layers that were joined, and hold what they held then."""
        return (
            first is self.layers[0]
            and second is self.layers[1]
            and all(
                layer[name] is view
                for layer, views in zip(self.layers, self.views, strict=True)
                for name, view in views.items()
            )
        )

    def __call__(self, x: mx.array) -> mx.array:
        return self.joined(x)
