"""mlx-lm's command lines with the plugin enabled, and clear errors for input that they trip over."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from .. import _hook, plugin
from ..checkpoint import json_object, read_config

# The beginning of an mlx-lm error that does not say what was wrong with the input -> one that does.
_CLEARER = {
    "Either input_embeddings or prompt": "the prompt is empty (--prompt); it must hold at least one token",
}


def run(prog: str, module_name: str, argv: list[str]) -> int:
    """Run `<module_name>.main()` of mlx-lm as if called with these arguments.

    Raises:
        ValueError: bad input.
        RuntimeError: the command is not part of the installed mlx-lm, or needs a package that is missing.
    """
    _check_flags(argv)
    if _hook.switched_off():
        print(f"{prog}: SPARK25_DISABLE is set; mlx-lm's own model is in use", file=sys.stderr)
        plugin.disable()
    else:
        plugin.enable()
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name:
            raise RuntimeError(f"the installed mlx-lm has no {module_name}") from error
        raise RuntimeError(f"{module_name} needs the package {error.name}, which is missing") from error
    before = sys.argv
    # argparse takes the program's name from here.
    sys.argv = [prog, *argv]
    try:
        module.main()
    except (ValueError, OSError) as error:
        clearer = _clearer(error, argv)
        if clearer is None:
            raise
        raise ValueError(clearer) from error
    finally:
        sys.argv = before
    return 0


def check_config(model: Path) -> dict[str, object]:
    """`config.json` in a model's directory.

    Raises:
        ValueError: there is none, it is no JSON object, or it does not name its `model_type`.
    """
    config = read_config(model)
    if not isinstance(config.get("model_type"), str):
        file = model / "config.json"
        raise ValueError(f"{file}: model_type is {config.get('model_type')!r}; it must be a string")
    return config


def _flag(argv: list[str], *names: str) -> str | None:
    """The value that the command line gives to a flag, in either spelling: `--flag value`, `--flag=value`."""
    value = None
    for i, argument in enumerate(argv):
        name, equals, attached = argument.partition("=")
        if name in names:
            value = attached if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return value


def _check_flags(argv: list[str]) -> None:
    """Refuse the values on which mlx-lm would fail without naming the flag."""
    step = _flag(argv, "--prefill-step-size")
    if step is not None and step.lstrip("-").isdigit() and int(step) < 1:
        raise ValueError(f"--prefill-step-size is {step}; it must be at least 1")
    template = _flag(argv, "--chat-template-config")
    if template is not None:
        json_object("--chat-template-config", template)
    model = _flag(argv, "--model", "--hf-path")
    if model is not None and Path(model).is_dir():
        check_config(Path(model))


def _clearer(error: Exception, argv: list[str]) -> str | None:
    """An error message that names the flag, when mlx-lm's own does not; None when its own will do."""
    if type(error).__module__.startswith("huggingface_hub"):
        model = _flag(argv, "--model", "--hf-path")
        if model is not None:
            return f"{model} is no directory here and could not be downloaded from Hugging Face: {error}"
    return next((text for start, text in _CLEARER.items() if str(error).startswith(start)), None)
