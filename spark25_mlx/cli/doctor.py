"""`spark25-mlx doctor`: whether the kernels are right on this machine, and what they are worth there."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__, _hook, plugin
from ..checkpoint import read_config
from ..config import FULL, SLIDING, ModelArgs, RopeArgs
from ..custom_kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from ..custom_kernels.backend import (
    REFERENCE,
    SWITCH,
    Kernel,
    backend_name,
    one_line,
    registered,
    relative_difference,
    switched_off,
)
from ..custom_kernels.decode_attention import (
    PLAIN,
    Shape,
    bind_decode_attention,
    kernel_that_fits,
    split_count,
    value_parts,
)
from ..custom_kernels.decode_linear import (
    Weight,
    bind_linear_add,
    bind_norm_geglu,
    bind_norm_qkv,
    example_weight,
)
from ..custom_kernels.geglu import geglu, geglu_reference
from ..custom_kernels.head_gate import (
    head_gate,
    head_gate_reference,
    project_gate,
    project_gate_reference,
)
from ..custom_kernels.qkv_rope import qkv_rope, qkv_rope_append, qkv_rope_reference
from ..custom_kernels.rope import rope_cos_sin, rope_table, rope_turns
from ..custom_kernels.turbo import TURBO, turbo_dequantize, turbo_quantize
from ..fusions import is_on
from .bench_models import SHAPES

_WIDTH = 100
_GPUS = ("metal", "cuda")
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
# (bits, group size) of the linear layers: plain, and mlx-lm's default quantisations.
_FORMATS = ((16, 0), (8, 64), (4, 64))
_OVER_CODES = ("decode_attention_quantised", "decode_attention_matrix", "decode_attention_turbo")
_ATTENDING = ("decode_attention", "decode_attention_final", *_OVER_CODES)
# Kernels whose check reads through MLX what the kernel has written into an input.
IN_PLACE = ("qkv_rope_append", *_ATTENDING)
_ATTENTION = (*_ATTENDING, "merge_gate", "merge_gate_turbo")
_LINEAR = ("norm_qkv", "norm_geglu", "linear_add")
# Formats of quantised caches; affine ones in mlx-lm's default groups.
_KV_FORMATS = ((8, 64), (4, 64), TURBO)
# Tokens in the cache of a timed call, and where the attention is one kernel at any length.
_OFFSETS = (4096, 512)
# The mx ops round between their steps, where the kernels do not: relative to the largest magnitude.
_MOST_APART = 0.1
_WARM_UPS, _REPEATS, _CALLS = 2, 11, 32

Key = tuple[Any, ...]
Format = tuple[int, int]
Call = Callable[[], Sequence[mx.array]]
Pair = tuple[Call, Call]
Report = dict[str, Any]


def doctor(prog: str, argv: list[str]) -> int:
    """Check and time every kernel, print the report; 0 when all is right or there is no GPU, otherwise 1.

    Raises:
        ValueError: the model's directory has no config.json of a Spark model, or SPARK25_KERNELS is wrong.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description="Check every GPU kernel against its reference on this machine, and time it."
    )
    parser.add_argument(
        "--model", metavar="PATH", type=Path, help="a model's directory; its shapes in place of the 4B's"
    )
    parser.add_argument("--quick", action="store_true", help="check bf16 alone and take no times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)

    def progress(message: str) -> None:
        print(f"{prog}: {message}", file=sys.stderr, flush=True)

    report = examine(arguments.model, quick=arguments.quick, progress=progress)
    print(json.dumps(report, indent=2, allow_nan=False) if arguments.json else text(report))
    return 0 if report["ok"] else 1


def examine(model: Path | None, *, quick: bool, progress: Callable[[str], None]) -> Report:
    """What `--json` prints.

    Args:
        model: directory with a config.json; None for the published models.
        quick: check bf16 alone and take no times.
        progress: told what comes next, before it is run.
    """
    # The 1.7B's heads are the 4B's, so its variants are too.
    config = SHAPES["4b"] if model is None else read_config(model)
    args, formats = ModelArgs.from_dict(config), formats_of(config)
    backend = backend_name()
    report = describe()
    report["shapes"] = "Spark 4B and 1.7B" if model is None else str(model)
    report["dtypes"] = [_name(dtype) for dtype in (_DTYPES[:1] if quick else _DTYPES)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # What Python and libraries plan to change says nothing about the kernels.
        for planned in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", planned)
        kernels = check_all(variants(args, formats, _DTYPES[:1] if quick else _DTYPES), progress)
        timed = backend in _GPUS and not quick
        working = [name for name, kernel in kernels.items() if kernel["status"] == "ok"]
        report["times"] = list(measure(args, formats, working, progress)) if timed else []
    report["times_note"] = _times_note(backend, args, quick=quick)
    report["kernels"] = kernels
    report["in_place"] = _in_place(kernels)
    report["warnings"] = [str(warning.message) for warning in caught]
    report["notes"] = []
    if backend in _GPUS and not is_on("fused_linear", backend):
        report["notes"].append(
            f"{', '.join(_LINEAR)} are checked, but the model does not use them on {backend}"
        )
    report["ok"], report["verdict"] = _verdict(report)
    return report


def describe() -> Report:
    """The machine and the versions."""
    device = mx.device_info()
    file = plugin.pth_file()
    memory = device.get("memory_size", device.get("total_memory"))
    return {
        "spark25_mlx": __version__,
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "python": platform.python_version(),
        "os": platform.platform(),
        "device": str(device.get("device_name", "unknown")),
        "architecture": str(device.get("architecture", platform.machine())),
        "memory_bytes": None if memory is None else int(memory),
        "backend": backend_name(),
        "registered": str(file) if file.exists() else None,
        "disabled": _hook.switched_off(),
    }


def formats_of(config: Mapping[str, Any]) -> tuple[Format, ...]:
    """(bits, group size) of the linear layers that the kernels read: (16, 0) for plain ones.

    Those that a quantised checkpoint's config.json names, otherwise the usual ones.
    """
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return _FORMATS
    # mlx-lm gives layers that differ from the rest an entry of their own.
    entries = [quantization, *(entry for entry in quantization.values() if isinstance(entry, Mapping))]
    readable = [(bits, group_size) for bits in (8, 4) for group_size in (32, 64, 128)]
    found = [
        (entry.get("bits"), entry.get("group_size"))
        for entry in entries
        if entry.get("mode", "affine") == "affine"
    ]
    return ((16, 0), *(key for key in readable if key in found))


def variants(args: ModelArgs, formats: Sequence[Format], dtypes: Sequence[mx.Dtype]) -> dict[str, list[Key]]:
    """Kernel -> keys of the variants that a model of this shape uses; none when it cannot use the kernel.

    `rope_table` comes first: the checks of the attention use it.
    """
    D, mode = args.head_dim, args.gate_attn_act_mode
    group = args.num_attention_heads // args.num_key_value_heads
    rotary = list(dict.fromkeys(rope.dims for rope in args.rope.values()))
    gates = [(D, mode)] if _fits(D) else []
    rotations = [(D, dims) for dims in rotary] if D % 32 == 0 else []
    heads = [(D, rope.dims, group, _window(args, kind), mode) for kind, rope in args.rope.items() if _fits(D)]
    over_codes = [
        (*head, 1, *kv_format)
        for head, kind in zip(heads, args.rope, strict=False)
        for kv_format in _KV_FORMATS
        if kind == FULL
    ]
    linear = {
        name + "_quantised" * quantised: [key for key in formats if (key[0] != 16) == quantised]
        for name in _LINEAR
        for quantised in (False, True)
    }
    rest: dict[str, Sequence[Key]] = {
        "geglu": [(False,), (True,)],
        "head_gate": gates,
        "project_gate": [(*gate, False) for gate in gates],
        "qkv_rope": rotations,
        "qkv_rope_append": rotations,
        "decode_attention": heads,
        "decode_attention_final": [
            (*head, 1, *PLAIN, value_parts(_shape(args, kind)))
            for head, kind in zip(heads, args.rope, strict=False)
        ],
        **dict.fromkeys(_OVER_CODES, over_codes),
        "merge_gate": gates,
        "merge_gate_turbo": gates,
        **linear,
    }
    return {
        "rope_table": [(dims,) for dims in rotary],
        "add_rms_norm": [(dtype, delta) for dtype in dtypes for delta in (None, dtype)],
        **{
            name: [(dtype, *key) for dtype in dtypes for key in keys if _is_used(args, name, dtype, key)]
            for name, keys in rest.items()
        },
    }


def _is_used(args: ModelArgs, kernel: str, dtype: mx.Dtype, key: Key) -> bool:
    """Whether a variant of a kernel that depends on the cache's format is the one for this dtype."""
    if kernel == "merge_gate_turbo":
        return _over_codes(args, TURBO, dtype) is not None
    return kernel not in _OVER_CODES or _over_codes(args, key[-2:], dtype) == kernel


def _over_codes(args: ModelArgs, kv_format: Format, dtype: mx.Dtype) -> str | None:
    """The kernel that attends to a quantised cache of a full layer, if one does."""
    if FULL not in args.rope or not _fits(args.head_dim):
        return None
    return kernel_that_fits(replace(_shape(args, FULL, kv_format), dtype=dtype))


def _fits(head_dim: int) -> bool:
    return head_dim % 32 == 0 and head_dim <= 256


def check_all(keys: Mapping[str, Sequence[Key]], progress: Callable[[str], None]) -> dict[str, Report]:
    """Kernel -> its state and what was found, as `--json` prints it."""
    return {name: _check(registered()[name], keys[name], progress) for name in keys}


def _check(kernel: Kernel, keys: Sequence[Key], progress: Callable[[str], None]) -> Report:
    result: Report = {"status": "ok", "variants": 0, "error": None, "failures": [], "instead": None}
    if backend_name() == REFERENCE:
        return result | {"status": REFERENCE, "instead": _instead(kernel.name)}
    if kernel.name in switched_off():
        return result | {"status": "switched off", "instead": _instead(kernel.name)}
    if not keys:
        return result | {"status": "unused"}
    progress(f"checking {kernel.name}, {_count(len(keys), 'variant')}")
    errors = []
    for key in keys:
        error, why = kernel.trial(*key)
        errors.append(error)
        if why:
            # Sizes that follow have the defaults of the check.
            names = signature(kernel.check).parameters
            variant = {name: _plain(part) for name, part in zip(names, key, strict=False)}
            result["failures"].append({"variant": variant, "error": _finite(error), "why": why})
    result |= {"variants": len(keys), "error": _finite(max(errors))}
    if result["failures"]:
        result |= {"status": "failed", "instead": _instead(kernel.name)}
    return result


def _instead(kernel: str) -> str:
    """What runs in place of a kernel."""
    if kernel == "qkv_rope_append":
        return "MLX's own cache update runs"
    if kernel in _ATTENTION:
        return "MLX's own cache update and attention run"
    if kernel.removesuffix("_quantised") in _LINEAR:
        return "MLX's matrix products run"
    return "its reference in mx ops runs"


def _in_place(kernels: Mapping[str, Report]) -> str:
    states = [kernels[name]["status"] for name in IN_PLACE]
    if "failed" in states:
        return "failed"
    return "passed" if "ok" in states else "not tested"


def _times_note(backend: str, args: ModelArgs, *, quick: bool) -> str:
    if backend == REFERENCE:
        return "no times: there is no GPU"
    if backend not in _GPUS:
        return f"no times: {backend} is no GPU"
    if quick:
        return "no times: --quick"
    return (
        f"microseconds a call, median of {_REPEATS} evaluations of {_CALLS} calls: one token, bf16, "
        f"hidden {args.hidden_size}, MLP {args.intermediate_size}, "
        f"{args.num_attention_heads}/{args.num_key_value_heads} heads of {args.head_dim}"
    )


def _verdict(report: Report) -> tuple[bool, str]:
    kernels = report["kernels"]
    if report["backend"] == REFERENCE:
        return True, "no GPU: reference in mx ops runs"
    named = {
        state: [name for name, kernel in kernels.items() if kernel["status"] == state]
        for state in ("ok", "failed", "switched off")
    }
    if failed := named["failed"]:
        return False, f"{_count(len(failed), 'kernel')} of {len(kernels)} failed: {', '.join(failed)}"
    apart = [row["kernel"] for row in report["times"] if row["problem"]]
    if apart:
        return False, f"wrong at the model's size: {', '.join(dict.fromkeys(apart))}"
    off = f"{len(named['switched off'])} switched off by {SWITCH}" if named["switched off"] else ""
    if not named["ok"]:
        return True, f"no kernel runs: {off}"
    fine = f"{_count(len(named['ok']), 'kernel')} right on {report['backend']}{', ' * bool(off)}{off}"
    if report["warnings"]:
        return False, f"{fine}; {_count(len(report['warnings']), 'warning')}"
    return True, f"all right: {fine}"


# --- times ---


@dataclass(frozen=True)
class Case:
    """One kernel at a size of decoding.

    Attributes:
        kernels: those that it launches.
        at: the size.
        prepare: makes the inputs; gives the call and the same in mx ops, alike but for roundings.
    """

    kernels: tuple[str, ...]
    at: str
    prepare: Callable[[], Pair]


def measure(
    args: ModelArgs, formats: Sequence[Format], working: Sequence[str], progress: Callable[[str], None]
) -> Iterator[Report]:
    """Times of the cases whose kernels all work, as `--json` prints them."""
    for case in cases(args, formats):
        if not set(case.kernels) <= set(working):
            continue
        name = " + ".join(case.kernels)
        progress(f"timing {name}, {case.at}")
        row: Report = {"kernel": name, "at": case.at, "kernel_us": None, "mx_us": None, "problem": None}
        try:
            call, in_mx = case.prepare()
            if (apart := difference(call, in_mx)) > _MOST_APART:
                row["problem"] = f"is {apart:.2g} of the largest magnitude away from mx ops"
            else:
                row |= {"kernel_us": _microseconds(call), "mx_us": _microseconds(in_mx)}
        except RuntimeError as error:
            row["problem"] = f"does not run: {one_line(error)}"
        yield row


def difference(call: Call, in_mx: Call) -> float:
    """Largest difference of two calls' arrays, relative to the largest magnitude of each array."""
    ours, theirs = call(), in_mx()
    # Arrays that a kernel writes in place are read once it has run.
    mx.eval(ours, theirs)
    return max(relative_difference(one, other) for one, other in zip(ours, theirs, strict=True))


def _microseconds(call: Call) -> float:
    """Of a call among many: a single one would show the cost of the evaluation."""
    times = []
    for _ in range(_WARM_UPS + _REPEATS):
        start = time.perf_counter()
        mx.eval([call() for _ in range(_CALLS)])
        times.append(time.perf_counter() - start)
    return round(statistics.median(times[_WARM_UPS:]) / _CALLS * 1e6, 2)


def cases(args: ModelArgs, formats: Sequence[Format]) -> Iterator[Case]:
    """Every kernel that a model of this shape uses for a token; nothing is allocated before `prepare`."""
    H, KV, D, K = args.num_attention_heads, args.num_key_value_heads, args.head_dim, args.hidden_size
    inner = args.intermediate_size
    yield Case(("add_rms_norm",), f"{K}", partial(_add_rms_norm, args))
    yield Case(("geglu",), f"{inner}", partial(_geglu, args))
    yield Case(("head_gate",), f"{H} x {D}", partial(_head_gate, args))
    yield Case(("project_gate",), f"{K} to {H} x {D}", partial(_project_gate, args))
    kind, rope = next(iter(args.rope.items()))
    yield Case(("rope_table",), f"rotary {rope.dims}", partial(_rope_table, rope))
    yield Case(("qkv_rope",), f"{H + 2 * KV} x {D}, rotary {rope.dims}", partial(_qkv_rope, args, rope))
    offset = _OFFSETS[0]
    size = f"{offset} rows, rotary {rope.dims}"
    yield Case(("qkv_rope_append",), size, partial(_qkv_rope_append, args, rope, offset))
    for final in (False, True):
        fitting = [
            (kind, offset)
            for offset in _OFFSETS
            for kind in args.rope
            if (split_count(offset - 1, _shape(args, kind)) == 1) == final
        ]
        for kind, offset in fitting[:1]:
            window = _window(args, kind)
            size = f"{offset} keys" if window is None else f"{min(offset, window)} keys, window"
            kernels = ("decode_attention_final",) if final else ("decode_attention", "merge_gate")
            yield Case(kernels, size, partial(_decode_attention, args, kind, offset))
    for kv_format in _KV_FORMATS:
        if (kernel := _over_codes(args, kv_format, _DTYPES[0])) is not None:
            offset, turbo = _OFFSETS[0], kv_format == TURBO
            kernels = (kernel, "merge_gate_turbo" if turbo else "merge_gate")
            size = f"{offset} keys, {kv_format[0]} bits{', turbo' if turbo else ''}"
            yield Case(kernels, size, partial(_decode_attention, args, FULL, offset, kv_format))
    for bits, group_size in formats:
        # MLX quantises whole groups.
        if any(columns % max(group_size, 1) for columns in (K, inner)):
            continue
        suffix, at = ("", "") if bits == 16 else ("_quantised", f", {bits} bits")
        size = f"{K} to {args.q_size + 2 * args.kv_size}{at}"
        yield Case((f"norm_qkv{suffix}",), size, partial(_norm_qkv, args, bits, group_size))
        size = f"{K} to 2 x {inner}{at}"
        yield Case((f"norm_geglu{suffix}",), size, partial(_norm_geglu, args, bits, group_size))
        size = f"{inner} to {K}{at}"
        yield Case((f"linear_add{suffix}",), size, partial(_linear_add, args, bits, group_size))


def _add_rms_norm(args: ModelArgs) -> Pair:
    K, eps = args.hidden_size, args.rms_norm_eps
    residual, delta, weight = _random(1, 1, K, dtype=mx.float32), _random(1, 1, K, seed=1), _random(K, seed=2)
    return (
        lambda: add_rms_norm(residual, delta, weight, eps=eps),
        lambda: add_rms_norm_reference(residual, delta, weight, eps=eps),
    )


def _geglu(args: ModelArgs) -> Pair:
    gate, up = (_random(1, 1, args.intermediate_size, seed=seed) for seed in (0, 1))
    return lambda: [geglu(gate, up)], lambda: [geglu_reference(gate, up)]


def _head_gate(args: ModelArgs) -> Pair:
    H, mode = args.num_attention_heads, args.gate_attn_act_mode
    x, scores = _random(1, H, 1, args.head_dim), _random(1, 1, H, seed=1)
    return lambda: [head_gate(x, scores, mode=mode)], lambda: [head_gate_reference(x, scores, mode=mode)]


def _project_gate(args: ModelArgs) -> Pair:
    H, K, mode = args.num_attention_heads, args.hidden_size, args.gate_attn_act_mode
    x, hidden = _random(1, H, 1, args.head_dim), _random(1, 1, K, seed=1)
    weight = _random(H, K, seed=2, scale=K**-0.5)
    return (
        lambda: [project_gate(x, hidden, weight, mode=mode)],
        lambda: [project_gate_reference(x, hidden, weight, None, mode=mode)],
    )


def _rope_table(rope: RopeArgs) -> Pair:
    turns, positions = rope_turns(rope.theta, rope.dims), _position(_OFFSETS[0] - 1)
    return (
        lambda: rope_table(positions, 1, turns)[1:],
        lambda: rope_cos_sin(turns, positions[:, None] + mx.arange(1)),
    )


def _qkv_rope(args: ModelArgs, rope: RopeArgs) -> Pair:
    turns, positions, qkv = rope_turns(rope.theta, rope.dims), _position(_OFFSETS[0] - 1), _qkv(args)
    H, KV = args.num_attention_heads, args.num_key_value_heads
    return (
        lambda: qkv_rope(qkv, positions, turns, n_heads=H, n_kv_heads=KV),
        lambda: qkv_rope_reference(qkv, positions, turns, n_heads=H, n_kv_heads=KV),
    )


class _Cache:
    """Keys and values of one sequence, full up to the row of its newest token."""

    def __init__(self, args: ModelArgs, offset: int, capacity: int) -> None:
        shape = (1, args.num_key_value_heads, capacity, args.head_dim)
        self.keys, self.values = _random(*shape, seed=3), _random(*shape, seed=4)
        self.positions = _position(offset - 1)
        self.row = (offset - 1) % capacity
        self.last: mx.array | None = None

    def append(self, k: mx.array, v: mx.array) -> None:
        """As a cache of MLX arrays does."""
        self.keys[:, :, self.row : self.row + 1] = k
        self.values[:, :, self.row : self.row + 1] = v


def _qkv_rope_append(args: ModelArgs, rope: RopeArgs, offset: int) -> Pair:
    turns, qkv, lengths = rope_turns(rope.theta, rope.dims), _qkv(args), mx.array([1], dtype=mx.int32)
    H, KV = args.num_attention_heads, args.num_key_value_heads
    ours, theirs = (_Cache(args, offset, offset) for _ in range(2))

    def call() -> list[mx.array]:
        after = qkv if ours.last is None else ours.last
        buffers = (ours.keys, ours.values, ours.positions)
        ours.last = qkv_rope_append(qkv, *buffers, lengths, turns, after, n_heads=H, n_kv_heads=KV)
        return [ours.last, ours.keys, ours.values]

    def in_mx() -> list[mx.array]:
        q, k, v = qkv_rope_reference(qkv, theirs.positions, turns, n_heads=H, n_kv_heads=KV)
        theirs.append(k, v)
        return [q, theirs.keys, theirs.values]

    return call, in_mx


def _decode_attention(args: ModelArgs, kind: str, offset: int, kv_format: Format = PLAIN) -> Pair:
    shape = _shape(args, kind, kv_format)
    H, KV, D, mode = shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.mode
    rope, window = args.rope[kind], shape.window
    capacity = offset if window is None else min(offset, window)
    qkv, scores, turns = _qkv(args), _random(1, 1, H, seed=1), rope_turns(rope.theta, rope.dims)
    ours, theirs = (_Cache(args, offset, capacity) for _ in range(2))
    attend = bind_decode_attention(shape, split_count(offset - 1, shape))
    table = rope_table(ours.positions, 1, turns)
    bits, group_size = kv_format
    rows: list[Any] = [ours.keys, ours.values]
    if shape.turbo:
        rows = [turbo_quantize(x) for x in rows]
        theirs.keys, theirs.values = (turbo_dequantize(*x).astype(qkv.dtype) for x in rows)
        mx.eval(rows, theirs.keys, theirs.values)
    elif shape.quantised:
        rows = [mx.quantize(x, group_size=group_size, bits=bits) for x in rows]
        theirs.keys, theirs.values = (
            mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)
            for codes, scales, biases in rows
        )
        mx.eval(rows, theirs.keys, theirs.values)

    def call() -> list[mx.array]:
        after = qkv if ours.last is None else ours.last
        ours.last = attend(qkv, scores, *rows, *table, after)
        return [ours.last]

    def in_mx() -> list[mx.array]:
        q, k, v = qkv_rope_reference(qkv, theirs.positions, turns, n_heads=H, n_kv_heads=KV)
        theirs.append(k, v)
        out = mx.fast.scaled_dot_product_attention(q, theirs.keys, theirs.values, scale=D**-0.5)
        return [head_gate_reference(out, scores, mode=mode)]

    return call, in_mx


def _norm_qkv(args: ModelArgs, bits: int, group_size: int) -> Pair:
    H, K, eps = args.num_attention_heads, args.hidden_size, args.rms_norm_eps
    residual, norm_weight = _random(1, 1, K, dtype=mx.float32), _random(K, seed=1)
    weight = _weight(args.q_size + 2 * args.kv_size, K, bits, group_size, 2)
    gate_weight = _random(H, K, seed=3, scale=K**-0.5)
    project = bind_norm_qkv(norm_weight, weight, gate_weight, eps=eps)

    def in_mx() -> list[mx.array]:
        _, x = add_rms_norm_reference(residual, None, norm_weight, eps=eps)
        return [_product(x, weight), x @ gate_weight.T]

    return lambda: project(residual), in_mx


def _norm_geglu(args: ModelArgs, bits: int, group_size: int) -> Pair:
    K, eps = args.hidden_size, args.rms_norm_eps
    residual, norm_weight = _random(1, 1, K, dtype=mx.float32), _random(K, seed=1)
    gate, up = (_weight(args.intermediate_size, K, bits, group_size, seed) for seed in (2, 3))
    activate = bind_norm_geglu(norm_weight, gate, up, eps=eps)

    def in_mx() -> list[mx.array]:
        _, x = add_rms_norm_reference(residual, None, norm_weight, eps=eps)
        return [geglu_reference(_product(x, gate), _product(x, up))]

    return lambda: activate(residual), in_mx


def _linear_add(args: ModelArgs, bits: int, group_size: int) -> Pair:
    K, inner = args.hidden_size, args.intermediate_size
    residual, x = _random(1, 1, K, dtype=mx.float32), _random(1, 1, inner, seed=1)
    weight = _weight(K, inner, bits, group_size, 2)
    add = bind_linear_add(weight, mx.bfloat16)
    return lambda: add(residual, x), lambda: [residual + _product(x, weight).astype(mx.float32)]


def _shape(args: ModelArgs, kind: str, kv_format: Format = PLAIN) -> Shape:
    """Of the attention of one token."""
    heads = args.num_attention_heads, args.num_key_value_heads, args.head_dim
    dims, mode = args.rope[kind].dims, args.gate_attn_act_mode
    matrix = is_on("matrix_attention", backend_name())
    return Shape(mx.bfloat16, 1, 1, *heads, dims, _window(args, kind), mode, *kv_format, matrix)


def _window(args: ModelArgs, kind: str) -> int | None:
    return args.sliding_window if kind == SLIDING else None


def _position(position: int) -> mx.array:
    return mx.array([position], dtype=mx.int32)


def _qkv(args: ModelArgs) -> mx.array:
    return _random(1, 1, args.q_size + 2 * args.kv_size)


def _random(*shape: int, seed: int = 0, scale: float = 1.0, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    x = (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)
    mx.eval(x)
    return x


def _weight(rows: int, columns: int, bits: int, group_size: int, seed: int) -> Weight:
    weight = example_weight(mx.bfloat16, bits, group_size, (rows, columns), seed)
    mx.eval(weight.arrays)
    return weight


def _product(x: mx.array, weight: Weight) -> mx.array:
    """x Wᵀ as MLX's linear layers compute it."""
    if weight.scales is None:
        return x @ weight.weight.T
    return mx.quantized_matmul(
        x, weight.weight, weight.scales, weight.biases, group_size=weight.group_size, bits=weight.bits
    )


# --- text ---


def text(report: Report) -> str:
    """The report in lines of at most 100 characters."""
    memory = report["memory_bytes"]
    size = "" if memory is None else f", {memory / 2**30:.0f} GiB"
    head = {
        "versions": f"spark25_mlx {report['spark25_mlx']}, mlx {report['mlx']}, mlx-lm {report['mlx_lm']}, "
        f"Python {report['python']}",
        "device": f"{report['device']} ({report['architecture']}{size})",
        "os": report["os"],
        "backend": report["backend"],
        "registered": report["registered"] or "no",
        "shapes": f"{report['shapes']}; {', '.join(report['dtypes'])}",
    }
    if report["disabled"]:
        head["disabled"] = "yes, by SPARK25_DISABLE"
    lines = [line for title, value in head.items() for line in _item(title, value)]
    lines += ["", *_kernel_table(report), ""]
    lines += textwrap.wrap(_in_place_line(report), _WIDTH)
    lines += ["", *_times_table(report), ""]
    for name, kernel in report["kernels"].items():
        lines += _failures(name, kernel)
    for row in report["times"]:
        if row["problem"]:
            lines += _item("FAILED", f"{row['kernel']} at {row['at']} {row['problem']}")
    for title in ("warning", "note"):
        for message in report[f"{title}s"]:
            lines += _item(title, message)
    lines += _item("verdict", report["verdict"])
    return "\n".join(lines)


def _kernel_table(report: Report) -> list[str]:
    kernels = report["kernels"]
    width = max(map(len, kernels))
    lines = [f"{'kernel':<{width}}  variants    error  status"]
    for name, kernel in kernels.items():
        error = "-" if kernel["error"] is None else f"{kernel['error']:.3g}"
        status = kernel["status"]
        if kernel["failures"]:
            status = f"FAILED in {len(kernel['failures'])}"
        lines.append(f"{name:<{width}}  {kernel['variants'] or '-':>8}  {error:>7}  {status}")
    return [*lines, "error: the largest difference from the reference, in units of what is tolerated"]


def _in_place_line(report: Report) -> str:
    states = [(name, report["kernels"][name]["status"]) for name in IN_PLACE]
    expected = ("ok", "unused") if report["in_place"] == "passed" else ("ok",)
    others = ", ".join(f"{name} {state}" for name, state in states if state not in expected)
    line = f"in-place self-test (a kernel writes into the cache, MLX reads it): {report['in_place']}"
    return f"{line} ({others})" if others and report["backend"] != REFERENCE else line


def _times_table(report: Report) -> list[str]:
    lines = textwrap.wrap(report["times_note"], _WIDTH)
    rows = [row for row in report["times"] if not row["problem"]]
    if rows:
        width = max(len(row["kernel"]) for row in rows)
        lines.append(f"{'kernel':<{width}}  {'at':<28}{'kernel':>10}{'mx ops':>10}  mx ops / kernel")
    for row in rows:
        ours, theirs = row["kernel_us"], row["mx_us"]
        ratio = theirs / max(ours, 0.01)
        lines.append(f"{row['kernel']:<{width}}  {row['at']:<28}{ours:>10.1f}{theirs:>10.1f}{ratio:>17.2f}")
    return lines


def _failures(name: str, kernel: Report) -> list[str]:
    """The first of each kind of failure of a kernel, and what runs instead."""
    if kernel["status"] == "switched off":
        return _item("off", f"{name} is switched off by {SWITCH}; {kernel['instead']} instead")
    lines: list[str] = []
    failures = kernel["failures"]
    for failure in failures[:2]:
        variant = " ".join(f"{key}={value}" for key, value in failure["variant"].items())
        lines += _item("FAILED", f"{name} ({variant}) {failure['why']}")
    if failures:
        more = f"and {_count(len(failures) - 2, 'more variant')}; " if len(failures) > 2 else ""
        lines += _item("", f"{more}{kernel['instead']} instead of {name}")
    return lines


def _item(title: str, value: str) -> list[str]:
    prefix = f"{title:<11} "
    return textwrap.wrap(
        value, _WIDTH, initial_indent=prefix, subsequent_indent=" " * 12, break_on_hyphens=False
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _plain(part: object) -> object:
    """A part of a variant's key as JSON has it."""
    return _name(part) if isinstance(part, mx.Dtype) else part


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
