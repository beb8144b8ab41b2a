"""The `spark25-mlx` command, in process and in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import spark25_mlx
from spark25_mlx import _hook, cli, plugin
from spark25_mlx.cli import mlx_lm_command
from spark25_mlx.custom_kernels import backend

from .tiny import random_weights, tiny_config

NATIVE = "mlx_lm.models.spark2_5.Model"
OURS = "spark25_mlx.model.Model"


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts and ends with nothing enabled and no variable of ours set."""
    for name in ("SPARK25_DISABLE", "SPARK25_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    plugin.disable()
    yield
    plugin.disable()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte tokenizer that adds no special tokens and has no chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    config = tiny_config(vocab_size=len(vocabulary), num_hidden_layers=4, layer_types=None)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: mx.array(w) for name, w in random_weights(config).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def error_line(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """The one line of ours on stderr, without the command's name."""
    prefix = f"{command}: error: "
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("spark25-mlx")]
    assert len(lines) == 1
    assert lines[0].startswith(prefix)
    return lines[0].removeprefix(prefix)


# --- the command line itself ---


def test_help_lists_own_commands_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    words = capsys.readouterr().out.split()
    listed = [word for word in words if word in {*cli.OWN, *cli.MLX_LM}]
    assert list(dict.fromkeys(listed))[: len(cli.OWN)] == list(cli.OWN)
    assert {*listed} == {*cli.OWN, *cli.MLX_LM}


def test_no_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: spark25-mlx")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"spark25-mlx {spark25_mlx.__version__}\n"


def test_unknown_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generat"]) == 2
    message = error_line(capsys, "spark25-mlx")
    assert message.startswith("unknown subcommand 'generat'")
    assert "generate" in message and "register" in message


@pytest.mark.parametrize("command", cli.OWN)
def test_own_commands_show_their_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: spark25-mlx {command}")


# --- mlx-lm's commands ---


@pytest.fixture
def fake_command(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the module behind `spark25-mlx generate` that records how it was called."""
    record = SimpleNamespace(argv=None, enabled=None, error=None)

    def main() -> None:
        record.argv, record.enabled = list(sys.argv), _hook.installed()
        if record.error is not None:
            raise record.error

    monkeypatch.setattr(mlx_lm_command, "import_module", lambda name: SimpleNamespace(main=main))
    return record


def test_arguments_reach_mlx_lm_unchanged_with_the_plugin_enabled(fake_command: SimpleNamespace) -> None:
    before = list(sys.argv)
    assert cli.main(["generate", "--model", "m", "-p", "--odd", "--", "-x"]) == 0
    assert fake_command.argv == ["spark25-mlx generate", "--model", "m", "-p", "--odd", "--", "-x"]
    assert fake_command.enabled
    assert sys.argv == before


def test_the_variable_leaves_mlx_lm_alone(
    fake_command: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARK25_DISABLE", "1")
    assert cli.main(["generate"]) == 0
    assert fake_command.enabled is False
    assert "SPARK25_DISABLE is set" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError, RuntimeError, OSError, NotImplementedError])
def test_errors_are_one_line(
    error: type[Exception], fake_command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command.error = error("first line,\n  second line")
    assert cli.main(["generate"]) == 1
    assert error_line(capsys, "spark25-mlx generate") == "first line, second line"


def test_long_errors_are_cut(fake_command: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    fake_command.error = ValueError("missing " + ", ".join(f"layer {i}" for i in range(1000)))
    assert cli.main(["generate"]) == 1
    message = error_line(capsys, "spark25-mlx generate")
    assert message.startswith("missing layer 0, layer 1") and message.endswith(
        "(SPARK25_TRACEBACK=1 shows all)"
    )
    assert len(message) < 700


def test_tracebacks_on_request(fake_command: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK25_TRACEBACK", "1")
    fake_command.error = ValueError("bad")
    with pytest.raises(ValueError, match="bad"):
        cli.main(["generate"])


def test_faults_of_the_program_keep_their_traceback(fake_command: SimpleNamespace) -> None:
    fake_command.error = TypeError("a fault")
    with pytest.raises(TypeError, match="a fault"):
        cli.main(["generate"])


def test_interrupt(fake_command: SimpleNamespace) -> None:
    fake_command.error = KeyboardInterrupt()
    assert cli.main(["generate"]) == 130


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("mlx_lm.evaluate", "the installed mlx-lm has no mlx_lm.evaluate"),
        ("lm_eval", "needs the package lm_eval"),
    ],
)
def test_commands_that_cannot_be_imported(
    missing: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(mlx_lm_command, "import_module", absent)
    assert cli.main(["evaluate"]) == 1
    assert message in error_line(capsys, "spark25-mlx evaluate")


def test_every_listed_command_exists_in_mlx_lm() -> None:
    package = Path(mlx_lm.__file__).parents[1]
    assert [
        name for name in cli.MLX_LM.values() if not (package / (name.replace(".", "/") + ".py")).is_file()
    ] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill-step-size", "0"], "--prefill-step-size is 0; it must be at least 1"),
        (["--prefill-step-size=-3"], "--prefill-step-size is -3; it must be at least 1"),
        (["--chat-template-config", "{x"], "--chat-template-config is not JSON"),
        (["--chat-template-config", "[1]"], "--chat-template-config is [1]; it must be a JSON object"),
    ],
)
def test_flags_that_mlx_lm_does_not_check(
    arguments: list[str],
    message: str,
    fake_command: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["generate", *arguments]) == 1
    assert message in error_line(capsys, "spark25-mlx generate")
    assert fake_command.argv is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json does not exist"),
        ("{", "config.json is not JSON"),
        ("[]", "config.json is []; it must be a JSON object"),
        ("{}", "config.json: model_type is None; it must be a string"),
    ],
)
def test_models_without_a_usable_config(
    text: str | None,
    message: str,
    tmp_path: Path,
    fake_command: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    for command in (["generate"], ["which"]):
        assert cli.main([*command, "--model", str(tmp_path)]) == 1
        assert message in error_line(capsys, f"spark25-mlx {command[0]}")
    assert fake_command.argv is None


def test_generate_runs_our_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[spark25_mlx.Model] = []
    plain = spark25_mlx.Model.__call__

    def counted(self: spark25_mlx.Model, *args: Any, **kwargs: Any) -> mx.array:
        calls.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(spark25_mlx.Model, "__call__", counted)
    assert cli.main(["generate", "--model", str(checkpoint), "-p", "hello", "-m", "3"]) == 0
    assert calls
    assert "Generation: 3 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty (--prompt); it must hold at least one token"),
        (["--prompt", "x", "--max-tokens", "0"], "Maximum number of tokens must be non-zero"),
    ],
)
def test_generate_with_bad_input(
    arguments: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--model", str(checkpoint), *arguments]) == 1
    assert message in error_line(capsys, "spark25-mlx generate")


def test_generate_with_a_model_that_is_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "nowhere" / "at" / "all")
    assert cli.main(["generate", "--model", model, "-p", "x"]) == 1
    assert error_line(capsys, "spark25-mlx generate").startswith(f"{model} is no directory here")


# --- which ---


def which(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["which", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_which_with_another_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_file": "own.py"}')
    report = which(capsys, "--model", str(tmp_path))
    assert report["model_class"] == "mlx_lm.models.llama.Model"
    assert report["model_file"] == "own.py"
    assert cli.main(["which", "--model", str(tmp_path)]) == 0
    assert "own.py" in capsys.readouterr().out


def test_which_with_a_type_that_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    assert cli.main(["which", "--model", str(tmp_path)]) == 1
    assert "no_such_type" in error_line(capsys, "spark25-mlx which")


def test_which_shows_the_kernels_of_our_model_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backend, "kernel_routes", lambda: {"geglu": "metal", "rope": "reference"})
    assert which(capsys)["kernel_routes"] == {}
    assert cli.main(["which"]) == 0
    assert "kernels      none" in capsys.readouterr().out
    plugin.enable()
    assert which(capsys)["kernel_routes"] == {"geglu": "metal", "rope": "reference"}
    assert cli.main(["which"]) == 0
    assert "kernels      geglu  metal\n             rope   reference\n" in capsys.readouterr().out


def test_which_does_not_enable_anything(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    assert which(capsys)["model_class"] == NATIVE
    assert not _hook.installed()
    _hook.install()
    sys.modules.pop("mlx_lm.models.spark2_5")
    assert which(capsys, "--model", str(checkpoint))["model_class"] == OURS


# --- a registered environment ---


class Environment:
    """A virtual environment that finds this package and mlx-lm where the tests found them."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site_packages = next(folder.glob("lib/python*/site-packages"))
        homes = dict.fromkeys(str(Path(module.__file__ or "").parents[1]) for module in (spark25_mlx, mlx_lm))
        (self.site_packages / "_dependencies.pth").write_text("\n".join(homes))
        self.folder = folder

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK25_", "PYTHON"))}
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env=clean | variables,
            capture_output=True,
            text=True,
        )

    def which(self, **variables: str) -> dict[str, Any]:
        done = self.run("-m", "spark25_mlx.cli", "which", "--json", **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def test_register_which_unregister(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env")
    file = environment.site_packages / "spark25_mlx_register.pth"

    report = environment.which()
    assert report["model_class"] == NATIVE
    assert report["registered"] is None

    done = environment.run("-m", "spark25_mlx.cli", "register")
    assert done.returncode == 0, done.stderr
    assert str(file) in done.stdout
    assert file.read_text().strip() in done.stdout

    report = environment.which()
    assert report == report | {
        "model_class": OURS,
        "args_class": "spark25_mlx.config.ModelArgs",
        "registered": str(file),
        "disabled": False,
        "spark25_mlx": spark25_mlx.__version__,
        "mlx": version("mlx"),
        "mlx_lm": mlx_lm.__version__,
    }
    assert report["backend"] in ("metal", "cuda", "reference")
    assert report["kernel_routes"].keys() == backend.registered().keys()

    report = environment.which(SPARK25_DISABLE="1")
    assert report["model_class"] == NATIVE
    assert report["disabled"] is True

    lookup = "from mlx_lm.utils import _get_classes as f; print(f({'model_type': 'spark2_5'})[0].__module__)"
    assert environment.run("-c", lookup).stdout.strip() == "spark25_mlx.model"

    text = environment.run("-m", "spark25_mlx.cli", "which").stdout
    assert OURS in text and str(file) in text

    done = environment.run("-m", "spark25_mlx.cli", "unregister")
    assert done.stdout == f"removed {file}\n"
    assert not file.exists()
    assert environment.which()["model_class"] == NATIVE
    assert environment.run("-m", "spark25_mlx.cli", "unregister").stdout.startswith("nothing to remove")


def test_register_where_the_package_is_not_installed(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env")
    (environment.site_packages / "_dependencies.pth").unlink()
    home = str(Path(spark25_mlx.__file__).parents[1])
    code = f"import sys; sys.path.append({home!r}); from spark25_mlx import cli; exit(cli.main(['register']))"
    done = environment.run("-c", code)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "install spark25-mlx into this environment first" in done.stderr
    assert not (environment.site_packages / "spark25_mlx_register.pth").exists()
