"""Plain mlx-lm commands in a registered environment: nothing is enabled until the model is looked up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import spark25_mlx

# What the registered line does at start-up, then `python -m`.
START = (
    "import runpy, sys; from spark25_mlx._hook import at_start; at_start(); "
    "runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"
)


def run(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARK25_")}
    environment["PYTHONPATH"] = str(Path(spark25_mlx.__file__).parents[1])
    # runpy takes the program's name out of the arguments, as python -m does.
    code = START.replace("sys.argv[1]", repr(module))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
    )


def spoken(done: subprocess.CompletedProcess[str]) -> str:
    """The generated text in what `generate` prints."""
    assert done.returncode == 0, done.stderr
    return done.stdout.split("=" * 10)[1]


@pytest.fixture
def model(checkpoint: Path) -> list[str]:
    return ["--model", str(checkpoint)]


def test_prompt_cache_files(model: list[str], tmp_path: Path) -> None:
    """The file is read before anything of this package is loaded, and by mlx-lm's own model as well."""
    file = tmp_path / "c.safetensors"
    file.write_bytes(b"old")
    prompt = ["--prompt", "tell me a long story " * 10, "--prompt-cache-file", str(file)]
    done = run("mlx_lm.cache_prompt", *model, *prompt)
    assert done.returncode == 0, done.stderr
    assert [*tmp_path.iterdir()] == [file]
    with safe_open(file, "np") as opened:
        classes = {value for key, value in opened.metadata().items() if key.startswith("1.")}
    assert classes == {"RotatingKVCache", "KVCache"}
    rest = [*model, "--prompt", " and now?", "--prompt-cache-file", str(file), "--max-tokens", "20"]
    text = spoken(run("mlx_lm.generate", *rest))
    assert text == spoken(run("mlx_lm.generate", *rest, SPARK25_DISABLE="1"))


def test_too_many_drafts(model: list[str]) -> None:
    arguments = [*model, "--draft-model", model[1], "--prompt", "x", "--num-draft-tokens", "65"]
    done = run("mlx_lm.generate", *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ValueError: --num-draft-tokens is 65;")


def test_bad_snapshots_variable(model: list[str]) -> None:
    done = run("mlx_lm.generate", *model, "--prompt", "x", SPARK25_SNAPSHOTS="every=0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ValueError: SPARK25_SNAPSHOTS: 'every=0' is not understood"
    )
