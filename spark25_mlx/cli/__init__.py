"""The `spark25-mlx` command: this package's own subcommands, and mlx-lm's with the plugin enabled."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__

PROG = "spark25-mlx"
# The longest error line; a checkpoint's missing tensors alone can fill pages.
_LONGEST = 600

# Subcommand -> (module below this one, its function (prog, argv) -> exit code, help).
OWN = {
    "register": ("registration", "register", "make plain mlx-lm use this package in the whole environment"),
    "unregister": ("registration", "unregister", "undo register"),
    "which": ("which", "which", "show which model class and kernels mlx-lm uses here"),
    "bench": ("bench", "bench", "measure decode and prefill speed against mlx-lm's own model"),
    "doctor": ("doctor", "doctor", "check and time the GPU kernels on this machine"),
}

# Subcommand -> module of mlx-lm.
MLX_LM = {
    "generate": "mlx_lm.generate",
    "chat": "mlx_lm.chat",
    "server": "mlx_lm.server",
    "convert": "mlx_lm.convert",
    "cache_prompt": "mlx_lm.cache_prompt",
    "lora": "mlx_lm.lora",
    "fuse": "mlx_lm.fuse",
    "perplexity": "mlx_lm.perplexity",
    "evaluate": "mlx_lm.evaluate",
    "benchmark": "mlx_lm.benchmark",
    "awq": "mlx_lm.quant.awq",
    "dwq": "mlx_lm.quant.dwq",
    "dynamic_quant": "mlx_lm.quant.dynamic_quant",
    "gptq": "mlx_lm.quant.gptq",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0, 1 for bad input, 2 for a wrong command line.

    Bad input is reported as one line on stderr; with SPARK25_TRACEBACK=1 the exception itself comes through.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        print(f"{PROG} {__version__}")
        return 0
    if command not in OWN and command not in MLX_LM:
        known = ", ".join([*OWN, *MLX_LM])
        return _fail(PROG, f"unknown subcommand {command!r}; it must be one of {known}", 2)
    try:
        return _run(command, rest)
    except KeyboardInterrupt:
        return 130
    # What bad input raises here, in mlx-lm, in transformers (ValueError, OSError) and in mlx (RuntimeError).
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("SPARK25_TRACEBACK", "") not in ("", "0"):
            raise
        return _fail(f"{PROG} {command}", str(error) or type(error).__name__, 1)


def _run(command: str, rest: list[str]) -> int:
    if command in OWN:
        module, function, _ = OWN[command]
        return getattr(import_module(f"{__name__}.{module}"), function)(f"{PROG} {command}", rest)
    from .mlx_lm_command import run

    return run(f"{PROG} {command}", MLX_LM[command], rest)


def _fail(prog: str, message: str, code: int) -> int:
    line = " ".join(message.split())
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]} ... (SPARK25_TRACEBACK=1 shows all)"
    print(f"{prog}: error: {line}", file=sys.stderr)
    return code


def _help() -> str:
    width = max(map(len, [*OWN, *MLX_LM])) + 2
    own = "\n".join(f"  {name:<{width}}{text}" for name, (*_, text) in OWN.items())
    mlx_lm = "\n".join(f"  {name:<{width}}{module}" for name, module in MLX_LM.items())
    return (
        f"usage: {PROG} SUBCOMMAND ...\n\n{own}\n\n"
        f"mlx-lm's subcommands with this package's model, all their options unchanged:\n\n{mlx_lm}\n\n"
        f"  {'-h, --help':<{width}}show this, or after a subcommand its own help\n"
        f"  {'--version':<{width}}show the version\n\n"
        "environment: SPARK25_DISABLE=1 keeps mlx-lm's own model; SPARK25_TRACEBACK=1 shows tracebacks"
    )
