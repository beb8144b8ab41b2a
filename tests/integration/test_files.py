"""Prompt cache files: from and for mlx-lm's own classes, damaged, and interrupted while they are written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import spark25_mlx
from spark25_mlx import cli, plugin
from spark25_mlx.cache import FullKVCache, LayerCache, QuantizedFullKVCache, SlidingKVCache

from .conftest import greedy, native, ours, prompt_of

LENGTHS = [10, 511, 512, 575, 577, 1300]


def save(file: Path, cache: list[Any]) -> Path:
    mlx_lm_cache.save_prompt_cache(str(file), cache, {"model": "m"})
    return file


def load(file: Path) -> list[Any]:
    return mlx_lm_cache.load_prompt_cache(str(file))


def filled(model: Any, length: int) -> list[Any]:
    """Caches after a prompt of this length, the last 30 tokens one by one."""
    cache = model.make_cache()
    prompt = prompt_of(length)
    model(mx.array([prompt[:-5]]), cache)
    for token in prompt[-5:]:
        model(mx.array([[token]]), cache)
    return cache


def logits(model: Any, cache: list[Any]) -> np.ndarray:
    """Of the next 90 tokens, in pieces of several lengths."""
    tokens = prompt_of(90, 3)
    pieces = [tokens[:1], tokens[1:2], tokens[2:20], tokens[20:]]
    return np.concatenate([np.array(model(mx.array([piece]), cache)) for piece in pieces], axis=1)


@pytest.mark.parametrize("length", LENGTHS)
def test_round_trip(length: int, tmp_path: Path) -> None:
    """Bit by bit, with as much to trim as before."""
    cache = filled(ours(), length)
    loaded = load(save(tmp_path / "c.safetensors", cache))
    wanted = logits(ours(), [c.copy() for c in cache])
    adopted = ours().adopt(loaded)
    assert [type(c) for c in adopted] == [SlidingKVCache, FullKVCache]
    for n in (1, 64, 65):
        assert adopted[0].can_trim(n) == cache[0].can_trim(n)
    np.testing.assert_array_equal(logits(ours(), loaded), wanted)


@pytest.mark.parametrize("bits", [8, 4])
def test_round_trip_of_a_quantised_layer(bits: int, tmp_path: Path) -> None:
    sliding, full = filled(ours(), 600)
    cache = [sliding, full.to_quantized(group_size=32, bits=bits)]
    loaded = load(save(tmp_path / "c.safetensors", cache))
    wanted = logits(ours(), [c.copy() for c in cache])
    np.testing.assert_array_equal(logits(ours(), loaded), wanted)
    assert type(loaded[1]) is QuantizedFullKVCache


@pytest.mark.parametrize("length", LENGTHS)
def test_files_of_mlx_lm(length: int, tmp_path: Path) -> None:
    """Saved without the plugin from mlx-lm's own model and caches; ours goes on as its own does."""
    plugin.disable()
    theirs = filled(native(), length)
    file = save(tmp_path / "c.safetensors", theirs)
    wanted = greedy(native(), [5], 60, theirs)
    plugin.enable()
    assert greedy(ours(), [5], 60, load(file)) == wanted


@pytest.mark.parametrize("length", LENGTHS)
def test_files_for_mlx_lm(length: int, tmp_path: Path) -> None:
    """mlx-lm's own model goes on from our file, without the plugin, as ours does."""
    cache = filled(ours(), length)
    file = save(tmp_path / "c.safetensors", cache)
    wanted = greedy(ours(), [5], 60, cache)
    plugin.disable()
    loaded = load(file)
    assert [type(c).__name__ for c in loaded] == ["RotatingKVCache", "KVCache"]
    assert greedy(native(), [5], 60, loaded) == wanted


def test_empty_caches(tmp_path: Path) -> None:
    loaded = load(save(tmp_path / "c.safetensors", ours().make_cache()))
    assert greedy(ours(), prompt_of(9), 5, loaded) == greedy(ours(), prompt_of(9), 5)


def test_what_mlx_lm_has_no_class_for(tmp_path: Path) -> None:
    """A batch, and a ring right behind a restored snapshot, keep this package's classes and all they hold."""
    cache = filled(ours(), 700)
    sliding = cache[0]
    snapshot = sliding.snapshot()
    sliding.restore(snapshot)
    loaded = load(save(tmp_path / "c.safetensors", cache))
    assert [type(c).__name__ for c in loaded] == ["SlidingKVCache", "KVCache"]
    np.testing.assert_array_equal(logits(ours(), loaded), logits(ours(), cache))
    batch = [c.merge([c, c]) for c in filled(ours(), 20)]
    loaded = load(save(tmp_path / "c.safetensors", batch))
    assert all(isinstance(c, LayerCache) and c.offsets == [20, 20] for c in loaded)


def test_other_models_caches_are_saved_as_they_are(tmp_path: Path) -> None:
    rotating = mlx_lm_cache.RotatingKVCache(max_size=4, keep=1)
    for _ in range(6):
        rotating.update_and_fetch(mx.ones((1, 1, 1, 2)), mx.ones((1, 1, 1, 2)))
    (loaded,) = load(save(tmp_path / "c.safetensors", [rotating]))
    assert type(loaded) is type(rotating)
    assert loaded.state[2:] == rotating.state[2:]


def test_a_name_without_the_ending(tmp_path: Path) -> None:
    """mlx adds it."""
    save(tmp_path / "c", filled(ours(), 10))
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


# Damage


def one_line(file: Path) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        load(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kept", [0, 7, 60, 3000, -1])
def test_truncated_file(kept: int, tmp_path: Path) -> None:
    file = save(tmp_path / "c.safetensors", filled(ours(), 100))
    file.write_bytes(file.read_bytes()[:kept])
    one_line(file)


def test_files_that_are_no_prompt_caches(tmp_path: Path) -> None:
    file = tmp_path / "c.safetensors"
    assert "does not exist" in one_line(file)
    file.write_text("<!DOCTYPE html>" * 10)
    assert "HTML" in one_line(file)
    mx.save_safetensors(str(file), {"w": mx.zeros(3)})
    assert "is no prompt cache" in one_line(file)
    mx.save_safetensors(str(file), {"0.0": mx.zeros(3)}, {"0": "", "1.0": "NoSuchCache", "2.0": ""})
    assert "is no prompt cache" in one_line(file)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent") as caught:
        save(tmp_path / "absent" / "c.safetensors", filled(ours(), 10))
    assert "\n" not in str(caught.value)


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(tmp_path / "c.safetensors", filled(ours(), 100))
    before = file.read_bytes()

    def full_disk(name: str, *_: Any) -> None:
        Path(name).write_bytes(b"half")
        raise RuntimeError("no space")

    monkeypatch.setattr(mx, "save_safetensors", full_disk)
    with pytest.raises(OSError, match=r"c.safetensors cannot be written: no space"):
        save(file, filled(ours(), 200))
    assert file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [file]


KILLED = """
import os, signal, sys
import mlx.core as mx
from mlx_lm.models import cache
from spark25_mlx import plugin
if sys.argv[2] == "on":
    plugin.enable()
def begin_and_die(name, *_):
    with open(name, "wb") as file:
        file.write(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)
mx.save_safetensors = begin_and_die
cache.save_prompt_cache(sys.argv[1], [cache.KVCache()])
"""


@pytest.mark.parametrize("enabled", ["on", "off"])
def test_kill_while_saving(enabled: str, tmp_path: Path) -> None:
    """kill -9 when half of the new file is written: the old one is whole; without the plugin it is lost."""
    file = save(tmp_path / "c.safetensors", filled(ours(), 100))
    before = file.read_bytes()
    root = str(Path(spark25_mlx.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(file), enabled], env=os.environ | {"PYTHONPATH": root}
    )
    assert done.returncode == -signal.SIGKILL
    assert (file.read_bytes() == before) is (enabled == "on")


# The commands


def test_cache_prompt_and_generate(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process with the plugin; then the file in one without it."""
    file = tmp_path / "c.safetensors"
    model = ["--model", str(checkpoint)]
    prompt = ["--prompt", "tell me a long story " * 10]
    assert cli.main(["cache_prompt", *model, *prompt, "--prompt-cache-file", str(file)]) == 0
    capsys.readouterr()
    rest = ["--prompt", " and now?", "--prompt-cache-file", str(file), "--max-tokens", "20"]
    assert cli.main(["generate", *model, *rest]) == 0
    text = capsys.readouterr().out
    assert "Generation: " in text
    plugin.disable()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARK25_")}
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", "generate", *model, *rest],
        env=environment | {"SPARK25_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert spoken(done.stdout) == spoken(text)


def spoken(output: str) -> str:
    """The generated text in what `generate` prints."""
    return output.split("=" * 10)[1]


def test_generate_with_a_damaged_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save(tmp_path / "c.safetensors", filled(ours(), 100))
    file.write_bytes(file.read_bytes()[:-1])
    arguments = ["--model", str(checkpoint), "--prompt", "x", "--prompt-cache-file", str(file)]
    assert cli.main(["generate", *arguments]) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("spark25-mlx"))
    assert f"{file} is cut off" in line
