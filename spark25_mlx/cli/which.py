"""`spark25-mlx which`: what plain mlx-lm uses for a Spark model in this environment."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import __version__, _hook, plugin
from .mlx_lm_command import check_config


def which(prog: str, argv: list[str]) -> int:
    """Print the classes that mlx-lm's own lookup gives, with nothing enabled but what is registered.

    Raises:
        ValueError: the model's directory has no usable config.json, or mlx-lm does not know its type.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description="Show which model class and kernels plain mlx-lm uses in this environment."
    )
    parser.add_argument("--model", metavar="PATH", type=Path, help="the directory of a model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    config = {"model_type": "spark2_5"} if args.model is None else check_config(args.model)
    report = describe(config)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(_text(report))
    return 0


def describe(config: dict[str, Any]) -> dict[str, Any]:
    """What is in use for a model with this config, as `--json` prints it."""
    model_class, args_class = import_module("mlx_lm.utils")._get_classes(config)
    in_use = model_class.__module__.startswith("spark25_mlx.")
    backend = import_module("spark25_mlx.custom_kernels.backend")
    file = plugin.pth_file()
    return {
        "model_type": config["model_type"],
        "model_class": _qualified(model_class),
        "args_class": _qualified(args_class),
        "model_file": config.get("model_file"),
        "registered": str(file) if file.exists() else None,
        "disabled": _hook.switched_off(),
        "spark25_mlx": __version__,
        "mlx": import_module("mlx.core").__version__,
        "mlx_lm": import_module("mlx_lm").__version__,
        "backend": backend.backend_name(),
        "kernel_routes": backend.kernel_routes() if in_use else {},
    }


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _text(report: dict[str, Any]) -> str:
    rows = {
        "model type": report["model_type"],
        "model class": report["model_class"],
        "args class": report["args_class"],
        "registered": report["registered"] or "no",
        "spark25_mlx": report["spark25_mlx"],
        "mlx": report["mlx"],
        "mlx-lm": report["mlx_lm"],
        "backend": report["backend"],
    }
    if report["disabled"]:
        rows["disabled"] = "yes, by SPARK25_DISABLE"
    if report["model_file"]:
        rows["note"] = f"config.json names model_file {report['model_file']!r}, which mlx-lm uses instead"
    routes = report["kernel_routes"] or {"none": "in use"}
    lines = [f"{name:<13}{value}" for name, value in rows.items()]
    width = max(map(len, routes))
    title = "kernels"
    for name, route in routes.items():
        lines.append(f"{title:<13}{name:<{width}}  {route}")
        title = ""
    return "\n".join(lines)
