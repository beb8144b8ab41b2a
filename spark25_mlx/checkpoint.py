"""Files of a checkpoint, looked at before they are loaded: damage is reported with the file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import MODEL_TYPES


class CheckpointError(ValueError):
    """A file that is damaged or is not what its name says."""


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model's folder.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; a model's directory must hold config.json")
    try:
        return json_object(str(file), file.read_text())
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not text: {error}") from error


def json_object(what: str, text: str) -> dict[str, Any]:
    """The JSON object in a text that the error calls `what`.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is {_short(value)}; it must be a JSON object")
    return value


def check_folder(folder: Path) -> None:
    """Look at the files that mlx-lm's `load_model` reads from a folder of one of this package's models.

    A folder without config.json, and one of another model, is left to mlx-lm.

    Raises:
        CheckpointError: config.json is no JSON object, or a `model*.safetensors` is damaged.
    """
    if not (folder / "config.json").is_file() or read_config(folder).get("model_type") not in MODEL_TYPES:
        return
    for file in sorted(folder.glob("model*.safetensors")):
        check_safetensors(file)


def check_safetensors(file: Path) -> None:
    """Compare a file with the layout of safetensors: 8 bytes with the header's length, a JSON header, data.

    Raises:
        CheckpointError: it is not such a file, or is shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if size < 8 or 8 + length > size:
            raise CheckpointError(f"{file} {_what_else(prefix, size)}; download it or make it again")
        text = stream.read(length)
    try:
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file} is no safetensors file: its header lists no tensors") from error
    if needed > size:
        raise CheckpointError(
            f"{file} is cut off: it has {size} bytes of {needed}; download it or make it again"
        )


def _what_else(prefix: bytes, size: int) -> str:
    """What a file is that cannot hold the header it begins with."""
    if size == 0:
        return "is empty"
    if prefix == b"version ":
        return "is no safetensors file but a Git LFS pointer"
    if prefix[:1] == b"<":
        return "is no safetensors file but HTML or XML"
    return f"is cut off or no safetensors file: it has {size} bytes and no whole header"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
