"""Spark-X2.5 / X2.6 for MLX: `enable()`, and mlx-lm loads the family with this package's model.

Importing the package loads no mlx; each name below does, on first use.
"""

__version__ = "0.1.0"

__all__ = ["Model", "ModelArgs", "__version__", "disable", "enable"]

# Named as typing's constant, which type checkers take for true; typing itself costs milliseconds at start-up.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import ModelArgs
    from .model import Model
    from .plugin import disable, enable

_HOMES = {"Model": "model", "ModelArgs": "config", "enable": "plugin", "disable": "plugin"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
