"""The import finder that puts this package's model in the place of mlx-lm's.

A registered environment runs `at_start` whenever its Python starts, so this module imports nothing but sys
and os, which every interpreter has loaded already. All decisions are `plugin`'s, which is loaded when mlx-lm
asks for the model.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

# mlx-lm imports mlx_lm.models.<model_type>.
MODULE_NAMES = ("mlx_lm.models.spark2_5", "mlx_lm.models.sparkx2_5")


class Finder:
    """Answers for `MODULE_NAMES`; every other import passes it by."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if fullname not in MODULE_NAMES:
            return None
        from spark25_mlx import plugin

        return plugin.find_spec(fullname)


def switched_off() -> bool:
    """Whether SPARK25_DISABLE keeps a registered environment from using this package in this process."""
    return os.environ.get("SPARK25_DISABLE", "") not in ("", "0")


def installed() -> bool:
    """Whether the finder stands in this process."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def install() -> None:
    """Put the finder before all others, once."""
    if not installed():
        sys.meta_path.insert(0, Finder())


def uninstall() -> None:
    """Take the finder out; nothing happens when there is none."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]


def at_start() -> None:
    """What the line that `register` wrote calls."""
    if not switched_off():
        install()
