"""`spark25-mlx bench`: decode and prefill speed of this package's model and of mlx-lm's own.

Both run in one process on the same arrays, in turns, so that what the device does meanwhile hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx

from .. import __version__
from ..cache import TurboFullKVCache, quantized_cache
from ..cache.quantized import VARIABLE
from ..custom_kernels.backend import REFERENCE, backend_name, kernel_routes, one_line, without
from ..fusions import FUSIONS, is_on
from .bench_models import (
    NATIVE,
    OURS,
    SHAPES,
    Subject,
    available_memory,
    checkpoint_subject,
    decode_memory,
    empty_cache,
    filled_cache,
    prefill_memory,
    random_subject,
    read_bytes,
)
from .bench_report import (
    Report,
    decode_side,
    markdown,
    milliseconds,
    plot,
    prefill_side,
    require_matplotlib,
    speed_ratio,
)
from .bench_timing import (
    DecodeRun,
    decode,
    memory_bandwidth,
    operations,
    pooled,
    prefill,
    random_prompt,
)

_MOST_TOKENS = 1 << 20
# A longer prompt is warmed up by its beginning.
_MOST_WARMUP = 4096
_DEFAULTS: dict[str, Any] = {
    "context": [2048, 32768],
    "prefill": [2048, 8192],
    "tokens": 64,
    "repeats": 5,
}
_QUICK: dict[str, Any] = {"context": [2048], "prefill": [], "tokens": 32, "repeats": 3}
_KV_BITS: dict[str, int | None] = {"none": None, "8": 8, "4": 4}


def bench(prog: str, argv: list[str]) -> int:
    """Measure, and print the report as Markdown.

    Returns:
        0, or 1 when a case failed on the device.

    Raises:
        ValueError: bad input.
        RuntimeError: a package that is needed is missing.
    """
    args = parse(prog, argv)
    if args.plot:
        require_matplotlib()
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        _check_writable(flag, file)
    memory = available_memory()
    sides = (OURS, NATIVE) if args.only is None else (args.only,)
    if args.model:
        subject = checkpoint_subject(args.model, args.bits, sides, memory)
    else:
        subject = random_subject(args.shape, args.bits or 16, sides, memory)
    run = _Run(args, subject, memory)
    report = run.report(shlex.join([*prog.split(), *argv]))
    print(markdown(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot(report, args.plot)
    return int(run.failed)


# --- the command line ---


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(prog: str, argv: list[str]) -> argparse.Namespace:
    """The command line, with the defaults that `--quick` changes filled in."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        description="Measure decode and prefill speed against mlx-lm's own model, on the same weights.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", choices=SHAPES, default="4b", help="random weights (default 4b)")
    what.add_argument("--model", metavar="PATH", type=Path, help="the directory of a checkpoint")
    parser.add_argument(
        "--bits", type=int, choices=(16, 8, 6, 4), help="of the weights (default 16; --model: as stored)"
    )
    parser.add_argument("--kv-bits", choices=_KV_BITS, default="none", help="of the full layers' caches")
    parser.add_argument(
        "--context", metavar="N,N,...", type=_lengths, help="decode cases, or none (default 2048,32768)"
    )
    parser.add_argument(
        "--prefill", metavar="N,N,...", type=_lengths, help="prefill cases, or none (default 2048,8192)"
    )
    parser.add_argument("--batch", metavar="N", type=_positive, default=1, help="sequences (default 1)")
    parser.add_argument("--tokens", metavar="N", type=_positive, help="decoded per run (default 64)")
    parser.add_argument("--repeats", metavar="N", type=_positive, help="runs of each case (default 5)")
    parser.add_argument("--only", choices=(OURS, NATIVE), help="measure one side only")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report with all samples")
    parser.add_argument("--plot", metavar="FILE.png", type=_png, help="draw tokens a second")
    parser.add_argument(
        "--quick", action="store_true", help="context 2048, no prefill, 32 tokens, 3 repeats unless given"
    )
    parser.add_argument(
        "--switch-off-each",
        action="store_true",
        help="repeat the first decode case without each kernel and fusion in turn",
    )
    args = parser.parse_args(argv)
    for name, value in (_QUICK if args.quick else _DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not args.context and not args.prefill:
        parser.error("--context and --prefill are both none; there is nothing to measure")
    if (kv_bits := _KV_BITS[args.kv_bits]) is not None:
        try:
            turbo = _is_turbo(kv_bits)
        except ValueError as error:
            parser.error(str(error))
        if turbo and args.only != OURS:
            parser.error(f"mlx-lm has no cache of {VARIABLE}=turbo; add --only ours, or unset {VARIABLE}")
    if args.switch_off_each and (args.only == NATIVE or not args.context):
        parser.error("--switch-off-each needs a --context, and no --only native")
    return args


def _integer(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to {most}")
    return int(text)


def _positive(text: str) -> int:
    return _integer(text, _MOST_TOKENS)


def _lengths(text: str) -> list[int]:
    """Lengths in tokens, each once; none for an empty list."""
    return [] if text == "none" else list(dict.fromkeys(_positive(part) for part in text.split(",")))


def _png(text: str) -> Path:
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return Path(text)


def _check_writable(flag: str, file: Path | None) -> None:
    if file is None:
        return
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"{flag}: {file} cannot be written; it must be a file in a directory that exists")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ValueError(f"{flag}: {file} cannot be written; permission is denied")


# --- running ---


def _of_full_layers(kv_bits: int | None) -> str:
    """What the report says of the full layers' caches if they are not like the others."""
    if kv_bits is None:
        return ""
    return f", full layers {kv_bits} bits{' (turbo)' if _is_turbo(kv_bits) else ''}"


def _is_turbo(kv_bits: int) -> bool:
    return isinstance(quantized_cache(bits=kv_bits), TurboFullKVCache)


class _Progress:
    """A bar where stderr is a terminal and tqdm is installed, else a line for each case."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            with suppress(ImportError):
                self._bar = import_module("tqdm").tqdm(total=total, file=sys.stderr, leave=False)
        self._current = ""

    def start(self, text: str) -> None:
        """A run of the case `text` begins."""
        if self._bar is not None:
            self._bar.set_description(text)
        elif text != self._current:
            print(text, file=sys.stderr, flush=True)
        self._current = text

    def done(self, runs: int = 1) -> None:
        """Runs that are over, measured or skipped."""
        if self._bar is not None:
            self._bar.update(runs)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Run:
    """All cases of one command line.

    Attributes:
        memory: bytes that the device could give before the models were there.
        wall: bytes a second, measured before the first case.
        failed: whether a case failed on the device; the notes say which and how.
    """

    def __init__(self, args: argparse.Namespace, subject: Subject, memory: int) -> None:
        self.args = args
        self.subject = subject
        self.memory = memory
        self.kv_bits = _KV_BITS[args.kv_bits]
        self.gpu = mx.default_device().type == mx.DeviceType.gpu
        self.wall = memory_bandwidth(min((1 << 30) if self.gpu else (1 << 27), memory // 8))
        cases = len(args.context) + len(args.prefill)
        self.progress = _Progress(cases * args.repeats * len(subject.models))
        self.notes: list[str] = []
        self.failed = False

    def report(self, command: str) -> Report:
        """Measure everything."""
        args, subject = self.args, self.subject
        if self.kv_bits and NATIVE in subject.models:
            self.notes.append(
                "mlx-lm itself refuses --kv-bits for this model, whose sliding caches it cannot quantise; "
                "here its full layers' caches are quantised as ours are"
            )
        try:
            decoded = self._cases("decode", args.context, self._decode_memory, self._decode_case)
            prefilled = self._cases("prefill", args.prefill, self._prefill_memory, self._prefill_case)
            switched_off = self._switch_off_each(decoded) if args.switch_off_each else None
        finally:
            self.progress.close()
        routes = kernel_routes()
        if self.gpu and OURS in subject.models:
            self.notes += [f"kernel {name}: {r}" for name, r in routes.items() if r.startswith(REFERENCE)]
        dtype = str(subject.dtype).removeprefix("mlx.core.")
        return {
            "command": command,
            "device": mx.device_info().get("device_name", "unknown"),
            "backend": backend_name() if self.gpu else "cpu",
            "versions": {
                "spark25_mlx": __version__,
                "mlx": import_module("mlx.core").__version__,
                "mlx-lm": import_module("mlx_lm").__version__,
                "Python": sys.version.split()[0],
            },
            "model": subject.name,
            "weights": subject.weights,
            "weight_bytes": subject.weight_bytes,
            "kv": dtype + _of_full_layers(self.kv_bits),
            "batch": args.batch,
            "tokens": args.tokens,
            "repeats": args.repeats,
            "wall_bytes_per_second": self.wall,
            "kernel_routes": routes,
            "decode": decoded,
            "prefill": prefilled,
            "switched_off": switched_off,
            "notes": self.notes,
        }

    def _decode_memory(self, context: int) -> int:
        return decode_memory(self.subject, context, self.args.tokens, self.args.batch, self.kv_bits)

    def _prefill_memory(self, length: int) -> int:
        return prefill_memory(self.subject, length, self.args.batch, self.kv_bits)

    def _cases(
        self,
        kind: str,
        lengths: Iterable[int],
        estimate: Callable[[int], int],
        measure: Callable[[int], Report],
    ) -> list[Report]:
        """The cases that fit the device; the others become notes."""
        results = []
        for length in lengths:
            needed = estimate(length)
            if needed > self.memory:
                self.notes.append(
                    f"{kind} {length} was skipped: it takes about {needed / 1e9:.1f} GB, and the device has "
                    f"{self.memory / 1e9:.1f} GB"
                )
                self.progress.done(self.args.repeats * len(self.subject.models))
                continue
            try:
                results.append(measure(length))
            except RuntimeError as error:
                # What is measured already must not be lost when the device gives up.
                self.failed = True
                self.notes.append(f"{kind} {length} FAILED: {one_line(error)}")
            mx.clear_cache()
        return results

    def _in_turns(self) -> Iterable[str]:
        """Sides in the order in which they run, each first every other time."""
        sides = list(self.subject.models)
        for repeat in range(self.args.repeats):
            yield from sides if repeat % 2 == 0 else sides[::-1]

    def _decode(self, side: str, context: int) -> DecodeRun:
        batch = self.args.batch
        cache = filled_cache(self.subject, side, context, batch, self.kv_bits)
        mx.clear_cache()
        return decode(self.subject.models[side], cache, batch, self.args.tokens)

    def _operations(self, side: str, context: int) -> Any:
        cache = filled_cache(self.subject, side, context, self.args.batch, self.kv_bits)
        return operations(self.subject.models[side], cache, self.args.batch)

    def _decode_case(self, context: int) -> Report:
        runs: dict[str, list[DecodeRun]] = {side: [] for side in self.subject.models}
        for side in self._in_turns():
            self.progress.start(f"decode, context {context}")
            runs[side].append(self._decode(side, context))
            self.progress.done()
        batch = self.args.batch
        needed = read_bytes(self.subject, context, batch, self.kv_bits)
        sides = {
            side: decode_side(x, batch=batch, read_bytes=needed, wall=self.wall) for side, x in runs.items()
        }
        return {
            "context": context,
            "read_bytes": needed,
            "graph_nodes": {side: self._operations(side, context).total() for side in runs},
            "sides": sides,
            "speed_ratio": speed_ratio(sides),
        }

    def _prefill_case(self, length: int) -> Report:
        subject, batch = self.subject, self.args.batch
        prompt = random_prompt(subject.args.vocab_size, batch, length)
        for side, model in subject.models.items():
            prefill(model, empty_cache(subject, side, self.kv_bits), prompt[:, :_MOST_WARMUP])
        runs: dict[str, list[Any]] = {side: [] for side in subject.models}
        for side in self._in_turns():
            self.progress.start(f"prefill, {length} tokens")
            mx.clear_cache()
            cache = empty_cache(subject, side, self.kv_bits)
            runs[side].append(prefill(subject.models[side], cache, prompt))
            self.progress.done()
        sides = {side: prefill_side(x, batch=batch, length=length) for side, x in runs.items()}
        return {"length": length, "sides": sides, "speed_ratio": speed_ratio(sides)}

    def _switch_off_each(self, decoded: list[Report]) -> Report | None:
        """The first decode case with and without each kernel and fusion, in turns."""
        backend = backend_name()
        if not decoded or backend == REFERENCE:
            why = "no kernel runs on this device" if decoded else "no decode case was measured"
            self.notes.append(f"--switch-off-each: {why}")
            return None
        context = decoded[0]["context"]
        names = {name: "kernel" for name, route in kernel_routes().items() if route == backend}
        # Its kernel has a stand-in of as many operations: it is switched off as the fusion.
        names.pop("decode_attention_matrix", None)
        # Turbo rows are read in no other way.
        choice = self.kv_bits and not _is_turbo(self.kv_bits)
        fusions = [name for name in FUSIONS if name != "matrix_attention" or choice]
        names |= {name: "fusion" for name in fusions if is_on(name, backend)}
        usual = self._operations(OURS, context)
        rows, unused = [], []
        for name, kind in names.items():
            self.progress.start(f"without {name}")
            with without(name):
                if kind == "kernel" and self._operations(OURS, context) == usual:
                    unused.append(name)
                    continue
            on, off = [], []
            for _ in range(self.args.repeats):
                on.append(self._decode(OURS, context))
                with without(name):
                    off.append(self._decode(OURS, context))
            on_ms, off_ms = (milliseconds(pooled(runs))["median_ms"] for runs in (on, off))
            rows.append(
                {"name": name, "kind": kind, "on_ms": on_ms, "off_ms": off_ms, "loss": off_ms / on_ms - 1}
            )
        if unused:
            self.notes.append(f"not part of this decode step, so not switched off: {', '.join(unused)}")
        return {"context": context, "rows": rows}
