"""`spark25-mlx bench`: what it reports for given timings, and whole runs of the tiny shape without a GPU."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from spark25_mlx import cli, fusions
from spark25_mlx.cli import bench, bench_models, bench_report, bench_timing
from spark25_mlx.cli.bench_models import NATIVE, OURS, Subject
from spark25_mlx.cli.bench_timing import DecodeRun, PrefillRun
from spark25_mlx.custom_kernels.backend import registered, suspended, without
from spark25_mlx.decode import Decoder
from tests import tiny

PLENTY = 1 << 40
BOTH = (OURS, NATIVE)
SHORT = ["--shape", "tiny", "--tokens", "2", "--repeats", "2"]


@pytest.fixture(autouse=True)
def given_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall takes a second to measure."""
    monkeypatch.setattr(bench, "memory_bandwidth", lambda nbytes: 1e9)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return bench_models.random_subject("tiny", 16, BOTH, PLENTY)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    config = tiny.tiny_config(hidden_size=64, head_dim=64, tie_word_embeddings=False)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: mx.array(w) for name, w in tiny.random_weights(config).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def report_of(arguments: list[str], tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "report.json"
    assert cli.main(["bench", *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())


# --- numbers from timings ---


def decode_run(*milliseconds: float, peak: int = 0) -> DecodeRun:
    """A run whose tokens took so long: a quarter building, a quarter submitting, half waiting."""
    seconds = [ms / 1e3 for ms in milliseconds]
    quarters = [s / 4 for s in seconds]
    return DecodeRun(quarters, list(quarters), [s / 2 for s in seconds], peak)


def test_decode_numbers() -> None:
    """Samples of all runs are pooled; tok/s counts the batch."""
    runs = [decode_run(4, 8, peak=5), decode_run(1, 2, 16, peak=7)]
    side = bench_report.decode_side(runs, batch=2, read_bytes=8_000_000, wall=10e9)
    assert side["median_ms"] == pytest.approx(4)
    assert (side["q25_ms"], side["q75_ms"]) == pytest.approx((2, 8))
    assert side["tokens_per_second"] == pytest.approx(500)
    assert side["wall_fraction"] == pytest.approx(0.2)
    assert side["peak_bytes"] == 7
    assert side["host_ms"] == pytest.approx({"build": 1, "submit": 1, "wait": 2})
    assert side["samples_ms"] == pytest.approx([4, 8, 1, 2, 16])


def test_prefill_numbers() -> None:
    runs = [PrefillRun([0.5], 3), PrefillRun([0.25], 9), PrefillRun([1.0], 4)]
    side = bench_report.prefill_side(runs, batch=2, length=100)
    assert side["median_ms"] == pytest.approx(500)
    assert side["tokens_per_second"] == pytest.approx(400)
    assert side["peak_bytes"] == 9


def test_speed_ratio() -> None:
    """Above 1 when ours takes less time."""
    ours, native = {"median_ms": 2.0}, {"median_ms": 3.0}
    assert bench_report.speed_ratio({OURS: ours, NATIVE: native}) == pytest.approx(1.5)
    assert bench_report.speed_ratio({OURS: ours}) is None
    assert bench_report.speed_ratio({NATIVE: native}) is None


def given_report(**changes: Any) -> bench_report.Report:
    sides = {
        side: bench_report.decode_side([decode_run(ms)], batch=1, read_bytes=1_500_000, wall=1e9)
        for side, ms in ((OURS, 2), (NATIVE, 3))
    }
    case = {
        "context": 2048,
        "read_bytes": 1_500_000,
        "graph_nodes": {OURS: 100, NATIVE: 200},
        "sides": sides,
        "speed_ratio": bench_report.speed_ratio(sides),
    }
    return {
        "command": "spark25-mlx bench",
        "device": "a device",
        "backend": "cuda",
        "versions": {"mlx": "1.2.3"},
        "model": "4b",
        "weights": "random",
        "weight_bytes": 8_220_000_000,
        "kv": "bfloat16",
        "batch": 1,
        "wall_bytes_per_second": 4e12,
        "decode": [case],
        "prefill": [],
        "switched_off": None,
        "notes": [],
    } | changes


def cells(text: str, start: str) -> list[list[str]]:
    """Cells of a table's lines that begin with a cell."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_markdown() -> None:
    text = bench_report.markdown(given_report(notes=["mind this"]))
    assert "- device: a device (cuda)" in text
    assert "- versions: mlx 1.2.3" in text
    assert "weights random, 8.22 GB" in text
    assert "wall: 4000.0 GB/s" in text
    ours, native, ours_host, native_host = cells(text, "2048")
    spread = "2.000 - 2.000"
    assert ours == ["2048", "spark25-mlx", "2.000", spread, "500.0", "1.50", "0.002", "75%", "0.00", "100"]
    assert native[1:6] == ["mlx-lm", "3.000", "3.000 - 3.000", "333.3", ""]
    assert ours_host == ["2048", "spark25-mlx", "0.500", "0.500", "1.000"]
    assert native_host == ["2048", "mlx-lm", "0.750", "0.750", "1.500"]
    assert "Prefill" not in text
    assert text.endswith("- mind this")


def test_markdown_of_switched_off() -> None:
    row = {"name": "geglu", "kind": "kernel", "on_ms": 2.0, "off_ms": 2.5, "loss": 0.25}
    text = bench_report.markdown(given_report(switched_off={"context": 2048, "rows": [row]}))
    assert cells(text, "geglu") == [["geglu", "kernel", "2.000", "2.500", "+25.0%"]]


def test_plot(tmp_path: Path) -> None:
    bench_report.require_matplotlib()
    file = tmp_path / "plot.png"
    bench_report.plot(given_report(), file)
    assert file.read_bytes().startswith(b"\x89PNG")


# --- what is measured ---


def test_models_share_their_arrays(subject: Subject) -> None:
    ours, native = (dict(tree_flatten(subject.models[side].parameters())) for side in BOTH)
    assert ours.keys() == native.keys()
    assert all(ours[name] is native[name] for name in ours)


def elements(tree: Any) -> int:
    return sum(array.size for array in dict(tree_flatten(tree)).values())


def test_weight_bytes(subject: Subject) -> None:
    assert (
        subject.weight_bytes == subject.step_weight_bytes == 2 * elements(subject.models[OURS].parameters())
    )


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_quantised_alike(bits: int) -> None:
    models = bench_models.random_subject("tiny", bits, BOTH, PLENTY).models
    for model in models.values():
        quantised = {
            path: module.bits
            for path, module in model.named_modules()
            if isinstance(module, nn.QuantizedLinear)
        }
        assert set(quantised.values()) == {bits}
        assert not any(path.endswith("g_proj") for path in quantised)
        assert type(model.model.embedding) is nn.QuantizedEmbedding


def test_checkpoint_with_a_head_of_its_own(checkpoint: Path) -> None:
    """A step only looks a row of the embedding up."""
    subject = bench_models.checkpoint_subject(checkpoint, None, BOTH, PLENTY)
    model = subject.models[NATIVE]
    assert subject.dtype == mx.float32
    assert subject.weight_bytes - subject.step_weight_bytes == model.model.embedding.weight.nbytes
    ids = mx.array([[1, 2, 3]])
    ours, native = (np.array(subject.models[side](ids)) for side in BOTH)
    np.testing.assert_allclose(ours, native, atol=1e-3)


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("side", BOTH)
@pytest.mark.parametrize("context", [5, 300])
def test_filled_cache(subject: Subject, side: str, context: int, kv_bits: int | None) -> None:
    """As many tokens as asked for, and steps go on from there."""
    cache = bench_models.filled_cache(subject, side, context, 2, kv_bits)
    names = {type(c).__name__ for c in cache}
    assert ("Quantized" in " ".join(names)) == (kv_bits is not None)
    run = bench_timing.decode(subject.models[side], cache, 2, 3)
    assert len(run.total) == 3
    assert run.peak >= subject.weight_bytes
    steps = bench_timing.WARMUP_STEPS + 3 + 1
    for layer in cache:
        offsets = layer.offsets if side == OURS else [layer.offset]
        assert set(offsets) == {context + steps}


def test_cache_of_rotated_rows(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What SPARK25_KV_FORMAT chooses is what is measured, said and counted."""
    affine = bench_models.read_bytes(subject, 1000, 1, 4)
    monkeypatch.setenv("SPARK25_KV_FORMAT", "turbo")
    turbo = bench_models.read_bytes(subject, 1000, 1, 4)
    args, layers = subject.args, subject.args.layer_types.count("full_attention")
    of_scales = 2 * args.num_key_value_heads * subject.dtype.size
    assert affine - turbo == layers * 1000 * of_scales * (2 * args.head_dim // 64 - 1)
    names = [type(c).__name__ for c in bench_models.filled_cache(subject, "ours", 70, 1, 4)]
    assert names.count("TurboFullKVCache") == layers
    assert bench._of_full_layers(4) == ", full layers 4 bits (turbo)"
    for flags, message in (
        (["--kv-bits", "8"], "SPARK25_KV_FORMAT=turbo has 4 bits a value, and 8 are asked for"),
        (
            ["--kv-bits", "4"],
            "mlx-lm has no cache of SPARK25_KV_FORMAT=turbo; add --only ours, or unset SPARK25_KV_FORMAT",
        ),
    ):
        with pytest.raises(SystemExit):
            bench.parse("bench", flags)
        assert message in capsys.readouterr().err
    monkeypatch.delenv("SPARK25_KV_FORMAT")
    assert bench._of_full_layers(4) == ", full layers 4 bits"


@pytest.mark.parametrize("side", BOTH)
def test_prefill_covers_the_prompt(subject: Subject, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_timing, "PREFILL_STEP", 16)
    cache = bench_models.empty_cache(subject, side)
    bench_timing.prefill(subject.models[side], cache, bench_timing.random_prompt(2048, 1, 41))
    assert {layer.offset for layer in cache} == {41}


@pytest.mark.parametrize("side", BOTH)
def test_operations_are_those_of_one_step(subject: Subject, side: str) -> None:
    """A gate and a softmax in each layer, one argmax; the context changes nothing once rings are full."""
    model = subject.models[side]
    counts = [
        bench_timing.operations(model, bench_models.filled_cache(subject, side, context, 1, None), 1)
        for context in (200, 300)
    ]
    assert counts[0] == counts[1]
    assert (counts[0]["Sigmoid"], counts[0]["Softmax"], counts[0]["ArgReduce"]) == (8, 8, 1)


def test_read_bytes_by_hand(subject: Subject) -> None:
    """2 full layers see all tokens and 6 see 64; a token is 64 keys and 64 values in each."""
    weights = subject.step_weight_bytes
    assert bench_models.read_bytes(subject, 1000, 1, None) == weights + (2 * 1000 + 6 * 64) * 256
    assert bench_models.read_bytes(subject, 10, 3, None) == weights + 3 * 8 * 10 * 256
    # 8 bits: 128 bytes, and a scale and a bias for each half.
    assert bench_models.read_bytes(subject, 1000, 1, 8) == weights + 2 * 1000 * (128 + 8) + 6 * 64 * 256


@pytest.mark.parametrize("kv_bits", [None, 4])
@pytest.mark.parametrize("side", BOTH)
def test_estimate_holds(subject: Subject, side: str, kv_bits: int | None) -> None:
    """The peak stays below the estimate, which is no more than several times as high."""
    context = 20_000
    needed = bench_models.decode_memory(subject, context, 2, 1, kv_bits)
    mx.clear_cache()
    before = mx.get_active_memory() - subject.weight_bytes
    mx.reset_peak_memory()
    cache = bench_models.filled_cache(subject, side, context, 1, kv_bits)
    filling = mx.get_peak_memory()
    peak = max(filling, bench_timing.decode(subject.models[side], cache, 1, 2).peak) - before
    assert needed / 4 < peak <= needed


def test_memory_bandwidth_is_a_number() -> None:
    assert 0 < bench_timing.memory_bandwidth(1 << 16) < 1e15


def test_available_memory() -> None:
    assert 0 < bench_models.available_memory() <= mx.get_memory_limit()


# --- switching off ---


def test_kernel_without_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict is used or made inside `without`, and the old one holds afterwards."""
    kernel = registered()["geglu"]
    monkeypatch.setattr("spark25_mlx.custom_kernels.backend.backend_name", lambda: "cuda")
    monkeypatch.setattr(kernel, "_verdicts", {("cuda", 1): ""})
    assert kernel.ready(1)
    with without("geglu", "rope_table"):
        assert not kernel.ready(1)
        assert not kernel.ready(2)
        assert kernel.route() == "reference (suspended)"
        with without("add_rms_norm"):
            assert suspended() == {"geglu", "rope_table", "add_rms_norm"}
    assert kernel.ready(1)
    assert kernel.route() == "cuda"
    assert kernel._verdicts == {("cuda", 1): ""}


def test_fusion_without() -> None:
    assert fusions.is_on("fused_linear", "cuda")
    with without("fused_linear"):
        assert not fusions.is_on("fused_linear", "cuda")
    assert fusions.is_on("fused_linear", "cuda")


def test_prepared_step_is_prepared_again(subject: Subject) -> None:
    """Launches that were prepared with a kernel are not used without it."""
    decoder = Decoder(subject.models[OURS].model)
    assert decoder.is_current()
    with without("norm_qkv"):
        assert not decoder.is_current()
        assert Decoder(subject.models[OURS].model).is_current()
    assert decoder.is_current()


@pytest.mark.parametrize("kv_bits", ["none", "8"])
def test_switch_off_each(kv_bits: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that the step does not use is named in a note; one that never ran is left out."""
    slow = {"norm_qkv": 3.0, "fused_linear": 5.0}
    routes = {"norm_qkv": "cuda", "geglu": "cuda", "head_gate": "reference (differs)"}
    routes["decode_attention_matrix"] = "cuda"
    monkeypatch.setattr(bench, "backend_name", lambda: "cuda")
    monkeypatch.setattr(bench, "kernel_routes", lambda: routes)

    def timed(*_: Any) -> DecodeRun:
        return decode_run(*[max([2.0, *(slow.get(name, 2.0) for name in suspended())])] * 2)

    monkeypatch.setattr(bench, "decode", timed)
    monkeypatch.setattr(bench, "operations", lambda *_: Counter(name for name in suspended() if name in slow))
    options = ["--context", "16", "--prefill", "none", "--only", "ours", "--switch-off-each"]
    report = report_of([*SHORT, *options, "--kv-bits", kv_bits], tmp_path)
    rows = {(row["name"], row["kind"]): row["loss"] for row in report["switched_off"]["rows"]}
    of_quantised = {("matrix_attention", "fusion"): 0.0} if kv_bits == "8" else {}
    assert rows == pytest.approx(
        {("norm_qkv", "kernel"): 0.5, ("fused_linear", "fusion"): 1.5, ("compiled_step", "fusion"): 0.0}
        | of_quantised
    )
    assert report["notes"] == ["not part of this decode step, so not switched off: geglu"]


def test_switch_off_each_without_kernels(tmp_path: Path) -> None:
    arguments = ["--context", "16", "--prefill", "none", "--only", "ours", "--switch-off-each"]
    report = report_of([*SHORT, *arguments], tmp_path)
    assert report["switched_off"] is None
    assert report["notes"] == ["--switch-off-each: no kernel runs on this device"]


# --- whole runs ---


def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plotted = tmp_path / "plot.png"
    arguments = [*SHORT, "--context", "10,100", "--prefill", "20", "--batch", "2", "--plot", str(plotted)]
    report = report_of(arguments, tmp_path)
    assert [case["context"] for case in report["decode"]] == [10, 100]
    assert [case["length"] for case in report["prefill"]] == [20]
    for case in report["decode"]:
        assert case["graph_nodes"].keys() == case["sides"].keys() == {OURS, NATIVE}
        assert min(case["graph_nodes"].values()) > 0
        assert all(len(side["samples_ms"]) == 4 for side in case["sides"].values())
        assert case["speed_ratio"] == bench_report.speed_ratio(case["sides"])
    for side in report["prefill"][0]["sides"].values():
        assert len(side["samples_ms"]) == 2
    assert report["versions"]["mlx-lm"]
    assert report["batch"] == 2
    assert plotted.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert bench_report.markdown(report) == printed.out.rstrip("\n")
    assert printed.err.splitlines() == ["decode, context 10", "decode, context 100", "prefill, 20 tokens"]


@pytest.mark.parametrize("side", BOTH)
def test_run_of_one_side(side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of([*SHORT, "--context", "10", "--prefill", "none", "--only", side], tmp_path)
    assert report["decode"][0]["sides"].keys() == {side}
    assert report["decode"][0]["speed_ratio"] is None
    assert report["prefill"] == []
    assert {OURS: "mlx-lm |", NATIVE: "spark25-mlx |"}[side] not in capsys.readouterr().out


def test_run_of_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(checkpoint), "--context", "10", "--prefill", "none", "--tokens", "2"]
    report = report_of([*arguments, "--repeats", "1", "--bits", "8", "--kv-bits", "4"], tmp_path)
    assert (report["model"], report["weights"]) == (checkpoint.name, "8 bits")
    assert report["kv"] == "float32, full layers 4 bits"
    assert [note for note in report["notes"] if "refuses --kv-bits" in note]


def test_case_that_does_not_fit(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = bench_models.decode_memory(subject, 10, 2, 1, None)
    monkeypatch.setattr(bench, "available_memory", lambda: needed)
    report = report_of([*SHORT, "--context", "10,1000000", "--prefill", "500000"], tmp_path)
    assert [case["context"] for case in report["decode"]] == [10]
    assert report["prefill"] == []
    for note, case in zip(report["notes"], ("decode 1000000", "prefill 500000"), strict=True):
        assert re.fullmatch(rf"{case} was skipped: it takes about [\d.]+ GB, and the device has .* GB", note)


def test_case_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The other cases are reported, and the exit code tells."""

    def fail(*_: Any) -> PrefillRun:
        raise RuntimeError("[malloc] out of\nmemory")

    monkeypatch.setattr(bench, "prefill", fail)
    assert cli.main(["bench", *SHORT, "--context", "10", "--prefill", "20"]) == 1
    out = capsys.readouterr().out
    assert cells(out, "10")
    assert "- prefill 20 FAILED: [malloc] out of memory" in out


# --- the command line ---


def test_quick() -> None:
    args = bench.parse("bench", ["--quick"])
    assert (args.shape, args.bits, args.context, args.prefill) == ("4b", None, [2048], [])
    assert (args.tokens, args.repeats) == (32, 3)
    assert bench.parse("bench", ["--quick", "--context", "7,9,7"]).context == [7, 9]


def error_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    """The only line on stderr, without the command's name, and the exit code."""
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    prefix = "spark25-mlx bench: error: "
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(prefix)
    return line.removeprefix(prefix), code


NO_LENGTH = "is not an integer from 1 to 1048576"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "7b"], "argument --shape: invalid choice: '7b'"),
        (["--bits", "5"], "argument --bits: invalid choice: 5"),
        (["--bits", "x"], "argument --bits: invalid int value: 'x'"),
        (["--kv-bits", "6"], "argument --kv-bits: invalid choice: '6'"),
        (["--context", "0"], f"argument --context: '0' {NO_LENGTH}"),
        (["--context", "2048,"], f"argument --context: '' {NO_LENGTH}"),
        (["--context", "1048577"], f"argument --context: '1048577' {NO_LENGTH}"),
        (["--prefill", "2k"], f"argument --prefill: '2k' {NO_LENGTH}"),
        (["--batch", "-1"], f"argument --batch: '-1' {NO_LENGTH}"),
        (["--tokens", "0"], f"argument --tokens: '0' {NO_LENGTH}"),
        (["--repeats", "1.5"], f"argument --repeats: '1.5' {NO_LENGTH}"),
        (["--only", "theirs"], "argument --only: invalid choice: 'theirs'"),
        (["--plot", "plot.jpg"], "argument --plot: 'plot.jpg' does not end in .png"),
        (["--shape", "tiny", "--model", "x"], "argument --model: not allowed with argument --shape"),
        (["--context", "none", "--prefill", "none"], "--context and --prefill are both none"),
        (["--switch-off-each", "--only", "native"], "--switch-off-each needs a --context, and no --only"),
        (["--switch-off-each", "--context", "none"], "--switch-off-each needs a --context, and no --only"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, code = error_line(arguments, capsys)
    assert line.startswith(message)
    assert code == 2


Bad = Callable[[Path], tuple[list[str], str]]


def no_directory(folder: Path) -> tuple[list[str], str]:
    return ["--model", str(folder / "x")], f"--model: {folder / 'x'} is no directory"


def other_model(folder: Path) -> tuple[list[str], str]:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return ["--model", str(folder)], f"{folder / 'config.json'}: model_type is 'llama'; it must be spark2_5"


def quantised_model(folder: Path) -> tuple[list[str], str]:
    config = {"model_type": "spark2_5", "quantization": {"bits": 4, "group_size": 64}}
    (folder / "config.json").write_text(json.dumps(config))
    return ["--model", str(folder), "--bits", "8"], f"--bits: the weights in {folder} are quantised already"


def json_nowhere(folder: Path) -> tuple[list[str], str]:
    file = folder / "missing" / "x.json"
    return ["--json", str(file)], f"--json: {file} cannot be written"


def plot_is_a_directory(folder: Path) -> tuple[list[str], str]:
    (folder / "x.png").mkdir()
    return ["--plot", str(folder / "x.png")], f"--plot: {folder / 'x.png'} cannot be written"


@pytest.mark.parametrize(
    "bad", [no_directory, other_model, quantised_model, json_nowhere, plot_is_a_directory]
)
def test_bad_input(bad: Bad, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = bad(tmp_path)
    line, code = error_line(arguments, capsys)
    assert line.startswith(message)
    assert code == 1


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything of them is computed."""
    monkeypatch.setattr(bench, "available_memory", lambda: 4_000_000_000)
    line, code = error_line(["--shape", "4b"], capsys)
    assert line == "the weights take 8.2 GB; the device has 4.0 GB"
    assert code == 1


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line, code = error_line([*SHORT, "--plot", "x.png"], capsys)
    assert "pip install 'spark25-mlx[bench]'" in line
    assert code == 1


def test_without_a_native_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("this mlx-lm has no mlx_lm.models.spark2_5")

    monkeypatch.setattr(bench_models, "native_module", missing)
    line, code = error_line(SHORT, capsys)
    assert line == "this mlx-lm has no mlx_lm.models.spark2_5; --only ours measures without it"
    assert code == 1
