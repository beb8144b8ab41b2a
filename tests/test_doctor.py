"""`spark25-mlx doctor`: what it reports and returns for kernels that are right, wrong, off or not there."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from spark25_mlx import cli, plugin
from spark25_mlx.cli import doctor
from spark25_mlx.config import ModelArgs
from spark25_mlx.custom_kernels import backend
from spark25_mlx.custom_kernels.backend import Factory, Kernel, forced, registered, switched_off
from tests import metal_sim
from tests.kernels.backends import CACHE_BUFFERS, kernel_of, simulated
from tests.metal_sim.planted import Planting
from tests.tiny import PUBLISHED, F, S, rope_parameters, tiny_config

LINES = 100
_numbers = count()


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of ours is set, and none of a test's settings of SPARK25_KERNELS outlives it."""
    monkeypatch.delenv("SPARK25_DISABLE", raising=False)
    set_kernels(monkeypatch, "")
    yield
    switched_off.cache_clear()


def set_kernels(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SPARK25_KERNELS", value)
    switched_off.cache_clear()


class Run:
    """One call of the command in process, its kernels built by `factory`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], factory: Factory | None, *arguments: str) -> None:
        self.code = self._call(factory, *arguments)
        self.out, self.err = capsys.readouterr()

    @staticmethod
    def _call(factory: Factory | None, *arguments: str) -> int:
        if factory is None:
            # As on a machine without a GPU.
            with patch.object(mx, "default_device", lambda: mx.Device(mx.cpu)):
                return cli.main(["doctor", *arguments])
        metal_sim.require_toolchain()
        # Verdicts are kept by the back end's name, so each run needs one of its own.
        name = f"simulated machine {next(_numbers)}"
        with forced(name, factory), metal_sim.options(writable=CACHE_BUFFERS):
            return cli.main(["doctor", *arguments])

    @property
    def report(self) -> dict[str, Any]:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


# Products of matrices are CUDA's way.
ON_CUDA = "decode_attention_matrix"


def states(report: dict[str, Any], *but: str) -> set[str]:
    """The states of all kernels that are used here, except some."""
    return {kernel["status"] for name, kernel in report["kernels"].items() if name not in (*but, ON_CUDA)}


# --- what is checked ---


@pytest.mark.parametrize("config", [config for config, _ in PUBLISHED.values()], ids=PUBLISHED)
def test_variants_are_those_of_the_published_models(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ModelArgs.from_dict(config)
    monkeypatch.setattr(doctor, "backend_name", lambda: "cuda")
    found = doctor.variants(args, doctor.formats_of(config), [mx.bfloat16, mx.float32])
    assert set(found) == set(registered())
    assert all(found.values())
    assert found["rope_table"] == [(256,), (64,)]
    assert found["add_rms_norm"][:2] == [(mx.bfloat16, None), (mx.bfloat16, mx.bfloat16)]
    # Of 16 heads or 8, up to 128 threadgroups.
    for name, rest in (("decode_attention", ()), ("decode_attention_final", (1, 16, 0, 4))):
        assert found[name] == [
            (dtype, 256, dims, 4, window, "sigmoid", *rest)
            for dtype in (mx.bfloat16, mx.float32)
            for dims, window in ((256, 512), (64, None))
        ]
    # Products of matrices are of halves.
    codes = {
        dtype: [(dtype, 256, 64, 4, None, "sigmoid", 1, bits, 64) for bits in (8, 4)]
        for dtype in (mx.bfloat16, mx.float32)
    }
    assert found["decode_attention_matrix"] == codes[mx.bfloat16]
    assert found["decode_attention_quantised"] == codes[mx.float32]
    monkeypatch.setattr(doctor, "backend_name", lambda: "metal")
    rotated = [(mx.bfloat16, 256, 64, 4, None, "sigmoid", 1, 4, 0)]
    assert found["decode_attention_turbo"] == rotated
    assert found["merge_gate_turbo"] == [(mx.bfloat16, 256, "sigmoid")]
    on_metal = doctor.variants(args, FORMATS, [mx.bfloat16, mx.float32])
    assert on_metal["decode_attention_quantised"] == [*codes[mx.bfloat16], *codes[mx.float32]]
    assert not on_metal["decode_attention_matrix"]
    assert on_metal["decode_attention_turbo"] == rotated
    assert found["norm_qkv"] == [(mx.bfloat16, 16, 0), (mx.float32, 16, 0)]
    assert found["linear_add_quantised"][:2] == [(mx.bfloat16, 8, 64), (mx.bfloat16, 4, 64)]


def test_default_shapes_are_the_4bs() -> None:
    args = ModelArgs.from_dict(doctor.SHAPES["4b"])
    assert replace(args, tie_word_embeddings=True) == ModelArgs.from_dict(PUBLISHED["4B"][0])


@pytest.mark.parametrize(
    ("quantization", "formats"),
    [
        (None, ((16, 0), (8, 64), (4, 64))),
        ({"bits": 4, "group_size": 32}, ((16, 0), (4, 32))),
        ({"bits": 4, "group_size": 64, "a": {"bits": 8, "group_size": 128}}, ((16, 0), (8, 128), (4, 64))),
        ({"bits": 4, "group_size": 64, "a": False, "mode": "affine"}, ((16, 0), (4, 64))),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, ((16, 0),)),
        ({"bits": 3, "group_size": 64}, ((16, 0),)),
        ({"bits": "4", "group_size": [64]}, ((16, 0),)),
    ],
)
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_formats(key: str, quantization: Any, formats: Any) -> None:
    assert doctor.formats_of({key: quantization}) == formats


def test_shape_that_some_kernels_do_not_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(head_dim=40)))
    run = Run(capsys, metal_sim.metal_kernel, "--json", "--quick", "--model", str(tmp_path))
    assert run.code == 0
    unused = {name for name, kernel in run.report["kernels"].items() if kernel["status"] == "unused"}
    assert {"qkv_rope", "qkv_rope_append", "decode_attention", "head_gate", "merge_gate"} <= unused
    assert states(run.report, *unused) == {"ok"}
    assert run.report["in_place"] == "not tested"


# --- right kernels ---


def test_all_right(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, metal_sim.metal_kernel, "--json", "--quick")
    report = run.report
    assert run.code == 0
    assert report == report | {
        "ok": True,
        "in_place": "passed",
        "times": [],
        "times_note": f"no times: {report['backend']} is no GPU",
        "warnings": [],
        "dtypes": ["bfloat16"],
        "shapes": "Spark 4B and 1.7B",
        "verdict": f"all right: {len(registered()) - 1} kernels right on {report['backend']}",
    }
    assert set(report["kernels"]) == set(registered())
    assert report["kernels"].pop(ON_CUDA)["status"] == "unused"
    for kernel in report["kernels"].values():
        assert kernel == kernel | {"status": "ok", "failures": [], "instead": None}
        assert kernel["variants"] >= 1
        assert 0 <= kernel["error"] <= 1
    assert report["kernels"]["decode_attention_final"]["error"] > 0
    for name in report["kernels"]:
        assert f"checking {name}, " in run.err


def test_json_and_text_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    report = Run(capsys, metal_sim.metal_kernel, "--json", "--quick").report
    lines = doctor.text(report).splitlines()
    assert max(map(len, lines)) <= LINES
    for key in ("spark25_mlx", "mlx", "mlx_lm", "python"):
        assert report[key] in lines[0]
    assert any("in-place self-test" in line and line.endswith("passed") for line in lines)
    rows = {cells[0]: cells[1:] for cells in map(str.split, lines) if len(cells) == 4}
    for name, kernel in report["kernels"].items():
        if name == ON_CUDA:
            continue
        variants, error, status = rows[name]
        assert (int(variants), status) == (kernel["variants"], "ok")
        assert float(error) == pytest.approx(kernel["error"], rel=0.01)
    assert lines[-1] == f"verdict     {report['verdict']}"


def test_all_dtypes_without_quick(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[mx.Dtype] = []

    def trial(kernel: Kernel, *key: Any) -> tuple[float, str]:
        seen.extend(part for part in key[:1] if isinstance(part, mx.Dtype))
        return 0.5, ""

    with patch.object(Kernel, "trial", trial):
        assert Run(capsys, metal_sim.metal_kernel).code == 0
    assert set(seen) == {mx.bfloat16, mx.float16, mx.float32}


def test_environment(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / ("a" * 60) / "register.pth"
    monkeypatch.setattr(plugin, "pth_file", lambda: file)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M9", "memory_size": 2**36})
    monkeypatch.setenv("SPARK25_DISABLE", "1")
    report = Run(capsys, None, "--json").report
    assert (report["device"], report["memory_bytes"], report["registered"]) == ("Apple M9", 2**36, None)
    assert report["disabled"]
    file.parent.mkdir(parents=True)
    file.touch()
    run = Run(capsys, None)
    assert "Apple M9" in run.out and "64 GiB" in run.out and "SPARK25_DISABLE" in run.out
    assert str(file) in "".join(line.strip() for line in run.out.splitlines())
    assert max(map(len, run.out.splitlines())) <= LINES


# --- wrong kernels ---


def test_planted_bug(capsys: pytest.CaptureFixture[str]) -> None:
    planting = Planting("total / float(H)", "total / float(H + 1)")
    run = Run(capsys, planting, "--json")
    assert planting.planted
    report = run.report
    assert run.code == 1
    assert report["verdict"] == f"1 kernel of {len(registered())} failed: add_rms_norm"
    assert states(report, "add_rms_norm") == {"ok"}
    kernel = report["kernels"]["add_rms_norm"]
    assert kernel["status"] == "failed"
    assert kernel["error"] > 100
    assert kernel["error"] == max(failure["error"] for failure in kernel["failures"])
    assert {"dtype": "float32", "delta_dtype": None} in [f["variant"] for f in kernel["failures"]]
    # A failure is shown whole, whatever the number of its variants.
    text = " ".join(doctor.text(report).split())
    assert "FAILED add_rms_norm (dtype=float16 delta_dtype=None) differs from its reference by" in text
    assert "its reference in mx ops runs instead of add_rms_norm" in text
    assert max(map(len, doctor.text(report).splitlines())) <= LINES


def test_wrong_in_place_write(capsys: pytest.CaptureFixture[str]) -> None:
    """The row next to the right one: the query that the kernel returns is right, the cache is not."""
    planting = Planting("position % capacity", "(position + 1) % capacity")
    run = Run(capsys, planting, "--quick")
    assert planting.planted
    assert run.code == 1
    assert (
        "in-place self-test (a kernel writes into the cache, MLX reads it): failed (qkv_rope_append"
        in run.out
    )
    assert "MLX's own cache update runs instead of qkv_rope_append" in " ".join(run.out.split())


def test_kernel_that_does_not_build(capsys: pytest.CaptureFixture[str]) -> None:
    def factory(name: str, **arguments: Any) -> Callable[..., Any]:
        if kernel_of(name) == "geglu":
            raise RuntimeError("Unable to build metal library\nprogram_source:7:1: error: no such thing")
        return metal_sim.metal_kernel(name=name, **arguments)

    run = Run(capsys, factory, "--json", "--quick")
    assert run.code == 1
    kernel = run.report["kernels"]["geglu"]
    assert kernel["error"] is None
    why = "does not run: Unable to build metal library program_source:7:1: error: no such thing"
    assert {failure["why"] for failure in kernel["failures"]} == {why}
    assert states(run.report, "geglu") == {"ok"}


def test_warning_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    def trial(kernel: Kernel, *key: Any) -> tuple[float, str]:
        if kernel.name == "geglu":
            warnings.warn("overflow somewhere", RuntimeWarning, stacklevel=1)
            warnings.warn("will be renamed", DeprecationWarning, stacklevel=1)
        return 0.5, ""

    with patch.object(Kernel, "trial", trial):
        run = Run(capsys, metal_sim.metal_kernel, "--json", "--quick")
    assert run.code == 1
    assert set(run.report["warnings"]) == {"overflow somewhere"}
    assert "warning     overflow somewhere" in doctor.text(run.report)


# --- no kernels ---


@pytest.mark.parametrize("arguments", [[], ["--quick"]])
def test_reference_backend(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, None, *arguments)
    assert run.code == 0
    lines = run.out.splitlines()
    assert lines[-1] == "verdict     no GPU: reference in mx ops runs"
    assert "no times: there is no GPU" in lines
    assert max(map(len, lines)) <= LINES
    report = Run(capsys, None, "--json", *arguments).report
    assert states(report) == {"reference"}
    assert report["in_place"] == "not tested"
    assert report["times"] == []


def test_kernels_switched_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_kernels(monkeypatch, "-geglu,-decode_attention")
    run = Run(capsys, metal_sim.metal_kernel, "--json", "--quick")
    assert run.code == 0
    report = run.report
    assert report["kernels"]["geglu"] == {
        "status": "switched off",
        "variants": 0,
        "error": None,
        "failures": [],
        "instead": "its reference in mx ops runs",
    }
    assert states(report, "geglu", "decode_attention") == {"ok"}
    assert report["verdict"].endswith(", 2 switched off by SPARK25_KERNELS")
    text = doctor.text(report)
    assert "geglu is switched off by SPARK25_KERNELS; its reference in mx ops runs instead" in text
    assert "passed (decode_attention switched off)" in " ".join(text.split())


def test_all_kernels_switched_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_kernels(monkeypatch, "off")
    run = Run(capsys, metal_sim.metal_kernel, "--json")
    assert run.code == 0
    assert states(run.report) == {"switched off"}
    assert run.report["verdict"] == f"no kernel runs: {len(registered())} switched off by SPARK25_KERNELS"


def test_bad_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for arguments, message in (
        (["--model", str(tmp_path)], "model_type is 'llama'"),
        (["--model", str(tmp_path / "nowhere")], f"{tmp_path / 'nowhere' / 'config.json'} does not exist"),
    ):
        run = Run(capsys, None, *arguments)
        assert (run.code, run.out) == (1, "")
        assert run.err.startswith("spark25-mlx doctor: error: ") and message in run.err
    set_kernels(monkeypatch, "-gegul")
    run = Run(capsys, metal_sim.metal_kernel)
    assert run.code == 1
    assert "SPARK25_KERNELS: '-gegul' is not" in run.err


# --- times ---

SMALL = tiny_config(
    hidden_size=128,
    intermediate_size=192,
    head_dim=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    layer_types=[S, S, S, F],
    rope_parameters=rope_parameters(),
)
FORMATS = ((16, 0), (8, 64), (4, 32))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls over few keys."""
    for name, value in (("_OFFSETS", (700, 300)), ("_WARM_UPS", 0), ("_REPEATS", 1), ("_CALLS", 2)):
        monkeypatch.setattr(doctor, name, value)


def test_what_is_compared_computes_the_same(few: None) -> None:
    metal_sim.require_toolchain()
    launched = set()
    with simulated() as launches, metal_sim.options(writable=CACHE_BUFFERS):
        for case in doctor.cases(ModelArgs.from_dict(SMALL), FORMATS):
            call, in_mx = case.prepare()
            launches.clear()
            # Twice: the in-place kernels depend on the call before.
            for _ in range(2):
                assert doctor.difference(call, in_mx) < doctor._MOST_APART / 2, case
            assert set(case.kernels) == set(launches), case
            launched.update(case.kernels)
    assert launched == set(registered()) - {ON_CUDA}


def test_times(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that is wrong only at the model's size, one that does not run there, and the others."""
    metal_sim.require_toolchain()
    args = ModelArgs.from_dict(SMALL)
    real = doctor._geglu

    def wrong(args: ModelArgs) -> doctor.Pair:
        call, in_mx = real(args)
        return (lambda: [2 * x for x in call()]), in_mx

    def broken(args: ModelArgs) -> doctor.Pair:
        raise RuntimeError("out of\nmemory")

    progress: list[str] = []
    with (
        simulated(),
        metal_sim.options(writable=CACHE_BUFFERS),
        patch.object(doctor, "_geglu", wrong),
        patch.object(doctor, "_head_gate", broken),
    ):
        working = [name for name in registered() if not name.startswith("merge_gate")]
        rows = list(doctor.measure(args, FORMATS, working, progress.append))
    by_name = {row["kernel"]: row for row in rows}
    # The attention that needs the kernel that does not work is left out with it.
    assert set(by_name) == set(working) - {name for name in working if name in doctor._ATTENDING} | {
        "decode_attention_final"
    }
    assert by_name["geglu"]["problem"].startswith("is 1 of the largest magnitude away")
    assert by_name["head_gate"]["problem"] == "does not run: out of memory"
    for name, row in by_name.items():
        fine = name not in ("geglu", "head_gate")
        assert (row["problem"] is None) == fine
        assert all((row[key] or 0) > 0 for key in ("kernel_us", "mx_us")) == fine
    assert len(progress) == len(rows)

    report = Run(capsys, metal_sim.metal_kernel, "--json", "--quick").report | {
        "times": rows,
        "times_note": doctor._times_note("metal", args, quick=False),
    }
    ok, verdict = doctor._verdict(report)
    assert (ok, verdict) == (False, "wrong at the model's size: geglu, head_gate")
    lines = doctor.text(report).splitlines()
    assert max(map(len, lines)) <= LINES
    assert any(line.startswith("FAILED      geglu at 192 is 1 of") for line in lines)
    assert any(
        line.split()[:3] == ["add_rms_norm", "128", f"{by_name['add_rms_norm']['kernel_us']:.1f}"]
        for line in lines
    )


@pytest.mark.parametrize(("arguments", "timed"), [([], True), (["--quick"], False)])
def test_a_gpu_is_timed(
    arguments: list[str], timed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels' checks and times stood in for."""
    row = {"kernel": "geglu", "at": "10240", "kernel_us": 2.0, "mx_us": 5.0, "problem": None}
    monkeypatch.setattr(backend, "_forced", ("metal", metal_sim.metal_kernel))
    monkeypatch.setattr(Kernel, "trial", lambda kernel, *key: (0.5, ""))
    monkeypatch.setattr(doctor, "measure", lambda args, formats, working, progress: iter([row]))
    assert cli.main(["doctor", "--json", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["times"] == ([row] if timed else [])
    assert ("microseconds" in report["times_note"]) == timed
    line = "geglu  10240                              2.0       5.0             2.50"
    assert (line in doctor.text(report).splitlines()) == timed
