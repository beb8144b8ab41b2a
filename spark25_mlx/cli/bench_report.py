"""Results of `spark25-mlx bench`: numbers from timings, as JSON, Markdown and a plot.

The report is one dict of plain values, which `--json` writes as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .bench_models import NATIVE, OURS
from .bench_timing import WALL, WARMUP_STEPS, DecodeRun, PrefillRun, pooled

_LABELS = {OURS: "spark25-mlx", NATIVE: "mlx-lm"}
Report = dict[str, Any]


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of samples in seconds."""
    q25, median, q75 = (float(q) for q in np.percentile(np.array(seconds) * 1e3, [25, 50, 75]))
    return {"median_ms": median, "q25_ms": q25, "q75_ms": q75}


def decode_side(runs: Sequence[DecodeRun], *, batch: int, read_bytes: int, wall: float) -> Report:
    """One side's numbers of a decode case.

    Args:
        read_bytes: that a step must read.
        wall: bytes a second.
    """
    times = milliseconds(pooled(runs))
    seconds = times["median_ms"] / 1e3
    parts = {
        part: milliseconds([s for run in runs for s in getattr(run, part)])["median_ms"]
        for part in ("build", "submit", "wait")
    }
    return {
        **times,
        "tokens_per_second": batch / seconds,
        "wall_fraction": read_bytes / seconds / wall,
        "peak_bytes": max(run.peak for run in runs),
        "host_ms": parts,
        "samples_ms": [s * 1e3 for s in pooled(runs)],
    }


def prefill_side(runs: Sequence[PrefillRun], *, batch: int, length: int) -> Report:
    """One side's numbers of a prefill case."""
    times = milliseconds(pooled(runs))
    return {
        **times,
        "tokens_per_second": batch * length / (times["median_ms"] / 1e3),
        "peak_bytes": max(run.peak for run in runs),
        "samples_ms": [s * 1e3 for s in pooled(runs)],
    }


def speed_ratio(sides: Mapping[str, Report]) -> float | None:
    """How many times as fast ours is as native, by medians; None when only one side was measured."""
    if OURS not in sides or NATIVE not in sides:
        return None
    return sides[NATIVE]["median_ms"] / sides[OURS]["median_ms"]


def markdown(report: Report) -> str:
    """The whole report as Markdown."""
    parts = [_head(report)]
    if report["decode"]:
        parts += [_decode_table(report["decode"]), _host_table(report["decode"])]
    if report["prefill"]:
        parts.append(_prefill_table(report["prefill"]))
    if report["switched_off"]:
        parts.append(_switch_table(report["switched_off"]))
    if report["notes"]:
        parts.append("Notes\n\n" + "\n".join(f"- {note}" for note in report["notes"]))
    return "\n\n".join(parts)


def _head(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"device: {report['device']} ({report['backend']})",
        f"versions: {versions}",
        f"command: `{report['command']}`",
        f"model: {report['model']}, weights {report['weights']}, {report['weight_bytes'] / 1e9:.2f} GB; "
        f"KV cache {report['kv']}; batch {report['batch']}",
        f"memory-bandwidth wall: {report['wall_bytes_per_second'] / 1e9:.1f} GB/s ({WALL})",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _decode_table(cases: Sequence[Report]) -> str:
    rows = [
        [
            f"{case['context']}",
            _LABELS[side],
            f"{x['median_ms']:.3f}",
            f"{x['q25_ms']:.3f} - {x['q75_ms']:.3f}",
            f"{x['tokens_per_second']:.1f}",
            _ratio(case, side),
            f"{case['read_bytes'] / 1e9:.3f}",
            f"{x['wall_fraction']:.0%}",
            f"{x['peak_bytes'] / 1e9:.2f}",
            f"{case['graph_nodes'][side]}",
        ]
        for case in cases
        for side, x in case["sides"].items()
    ]
    titles = [
        "context",
        "model",
        "ms/token",
        "quartiles",
        "tok/s",
        "speed ours / native",
        "GB to read",
        "of wall",
        "peak GB",
        "graph nodes",
    ]
    text = (
        f"Decode, greedy; cache filled with random keys and values; {WARMUP_STEPS} untimed steps before each "
        "run. ms/token is a step's time, tok/s counts the whole batch."
    )
    return f"{text}\n\n{_table(titles, rows)}"


def _host_table(cases: Sequence[Report]) -> str:
    rows = [
        [f"{case['context']}", _LABELS[side], *(f"{ms:.3f}" for ms in x["host_ms"].values())]
        for case in cases
        for side, x in case["sides"].items()
    ]
    titles = ["context", "model", "build graph ms", "async_eval ms", "wait ms"]
    return f"Host time of a decode step, medians.\n\n{_table(titles, rows)}"


def _prefill_table(cases: Sequence[Report]) -> str:
    rows = [
        [
            f"{case['length']}",
            _LABELS[side],
            f"{x['median_ms']:.1f}",
            f"{x['q25_ms']:.1f} - {x['q75_ms']:.1f}",
            f"{x['tokens_per_second']:.0f}",
            _ratio(case, side),
            f"{x['peak_bytes'] / 1e9:.2f}",
        ]
        for case in cases
        for side, x in case["sides"].items()
    ]
    titles = ["prompt", "model", "ms", "quartiles", "tok/s", "speed ours / native", "peak GB"]
    return f"Prefill in pieces of 2048, up to the first token.\n\n{_table(titles, rows)}"


def _switch_table(result: Report) -> str:
    rows = [
        [x["name"], x["kind"], f"{x['on_ms']:.3f}", f"{x['off_ms']:.3f}", f"{x['loss']:+.1%}"]
        for x in result["rows"]
    ]
    text = f"One switched off at a time, decode at context {result['context']}; loss is time added."
    return f"{text}\n\n{_table(['name', 'kind', 'ms/token on', 'ms/token off', 'loss'], rows)}"


def _ratio(case: Report, side: str) -> str:
    ratio = case["speed_ratio"]
    return f"{ratio:.2f}" if ratio is not None and side == OURS else ""


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def require_matplotlib() -> None:
    """Raise RuntimeError when there is none."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise RuntimeError(
            "--plot needs matplotlib, which is missing: pip install 'spark25-mlx[bench]'"
        ) from error


def plot(report: Report, file: Path) -> None:
    """Draw tok/s of both sides, decode and prefill, with the quartiles as bars."""
    from matplotlib.figure import Figure

    panels = [
        (kind, key, report[kind])
        for kind, key in (("decode", "context"), ("prefill", "length"))
        if report[kind]
    ]
    figure = Figure(figsize=(5.5 * max(len(panels), 1), 4), layout="constrained")
    for i, (kind, key, cases) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        for side, label in _LABELS.items():
            measured = [case for case in cases if side in case["sides"]]
            if not measured:
                continue
            speed = [case["sides"][side]["tokens_per_second"] for case in measured]
            axes.errorbar(
                [case[key] for case in measured],
                speed,
                yerr=np.array([_spread(case["sides"][side]) for case in measured]).T,
                marker="o",
                capsize=3,
                label=label,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks([case[key] for case in cases], [f"{case[key]}" for case in cases])
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        axes.set_xlabel(f"{key} (tokens)")
        axes.set_ylabel("tokens / s")
        axes.set_title(kind)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{report['model']}, weights {report['weights']}, {report['device']}", fontsize=9)
    figure.savefig(file, dpi=150)


def _spread(side: Report) -> tuple[float, float]:
    """How far the quartiles of tokens a second are below and above the median."""
    speed, median = side["tokens_per_second"], side["median_ms"]
    return speed - speed * median / side["q75_ms"], speed * median / side["q25_ms"] - speed
