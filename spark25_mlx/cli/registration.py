"""`spark25-mlx register` and `spark25-mlx unregister`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from .. import plugin

_HOOK_RUNS = "import sys; sys.exit('spark25_mlx._hook' not in sys.modules)"


def register(prog: str, argv: list[str]) -> int:
    """Register the environment of the running interpreter, and check that a new interpreter sees it.

    Raises:
        plugin.RegistrationError: the file cannot be written, or would have no effect.
    """
    _no_arguments(prog, argv, "Make mlx-lm use this package's model in every Python of this environment.")
    file = plugin.register()
    if subprocess.run([sys.executable, "-c", _HOOK_RUNS], check=False).returncode:
        plugin.unregister()
        raise plugin.RegistrationError(
            f"{sys.executable} does not find spark25_mlx when it starts, so {file} had no effect and was "
            "removed; install spark25-mlx into this environment first"
        )
    print(f"wrote {file}:\n  {file.read_text().strip()}")
    print("mlx-lm now uses this package's model in every Python of this environment.")
    print("SPARK25_DISABLE=1 turns it off for one process, spark25-mlx unregister for all.")
    return 0


def unregister(prog: str, argv: list[str]) -> int:
    """Undo `register`.

    Raises:
        plugin.RegistrationError: the file cannot be removed.
    """
    _no_arguments(prog, argv, "Make mlx-lm use its own model again in this environment.")
    removed = plugin.unregister()
    print(f"removed {removed}" if removed else f"nothing to remove: {plugin.pth_file()} does not exist")
    return 0


def _no_arguments(prog: str, argv: list[str], description: str) -> None:
    argparse.ArgumentParser(prog=prog, description=description).parse_args(argv)
