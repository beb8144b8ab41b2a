"""How exact the formats are that a quantised cache of a full-attention layer could store keys and values in.

    python benchmarks/kv_formats.py

It prints two Markdown tables: the error of every format, and the error of `affine` over that of `turbo` at
the same number of bits. Formats:

- `bf16`: no quantisation; what rounding to the dtype of a plain cache costs.
- `affine`: `mx.quantize`, a bf16 scale and a bf16 bias for each group of neighbouring elements of a head.
- `turbo`: a row x of head_dim D is rotated, y = R x, and stored as one fp16 scale and, for each element, the
  nearest of 2^bits fixed levels to y_i / rms(y); the scale gives the row that is read back the norm of x. The
  rotation is that of `custom_kernels.turbo`, which also has the cache's own form of the format ("as stored").
  Queries are rotated too, (R q) . (R k) = q . k, and the weighted sum of rotated values is rotated back once
  a query.
- `affine, rotated`, `turbo, even levels` and `turbo, rms scale` (rms(y)) tell what each part is worth, and
  `affine, refitted` what another encoder would be: `mx.quantize` rounds scales and biases to bf16 after it
  has chosen the codes, here the codes are chosen for the rounded ones.

Why turbo can work: an orthogonal R leaves norms and inner products alone, and each element of R x is a sum
over all elements of x with random signs, so that it is nearly Gaussian, its variance rms(x)^2, for any x: an
outlying channel is spread over the whole head. One set of levels then serves every row, and needs no bias.

Sources. Rotations against outliers: QuaRot (Ashkboos et al. 2024, arXiv:2404.00456). A random rotation, then
the best scalar quantiser of its elements, for vectors that come one by one: TurboQuant (Zandieh et al. 2025,
arXiv:2504.19874), of which this is the part that minimises the squared error. The levels are those of Lloyd
(IEEE Trans. Inf. Theory 28, 1982) and Max (IRE Trans. Inf. Theory 6, 1960): the squared error is least when
each level is the mean of the density over its cell and each cell ends halfway between two levels.

Errors are in float64 against keys and values that nothing has rounded, for the last QUERIES of TOKENS tokens,
each seeing all keys up to its own position: logits are q . k / sqrt(D), outputs the softmax's weighted sums
of the values. A figure is the rms of the difference over the rms of the exact one, averaged over the KV
heads. Queries and softmax are exact, and affine rows are decoded in fp32: only the storage is judged.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from spark25_mlx.attention import plan
from spark25_mlx.cli.bench_models import SHAPES
from spark25_mlx.config import FULL, ModelArgs
from spark25_mlx.custom_kernels import turbo as turbo_format
from spark25_mlx.custom_kernels.add_rms_norm import add_rms_norm
from spark25_mlx.custom_kernels.qkv_rope import qkv_rope
from spark25_mlx.model import Model, rope_for

TINY = Path(__file__).parents[1] / "examples" / "tiny"
TOKENS = 1024
QUERIES = 256
SEED = 25
OUTLIERS = 4  # channels of a KV head's keys
OUTLIER_FACTOR = 10.0
SCALE_BITS = 16  # of a bf16 or fp16 number

AFFINE_BITS = (2, 3, 4, 6, 8)
TURBO_BITS = (2, 3, 4, 8)
GROUP_SIZES = (32, 64, 128)

# --- levels ---


@cache
def gaussian_levels(bits: int, even: bool = False, tolerance: float = 1e-7) -> np.ndarray:
    """The 2^bits levels that quantise a unit Gaussian with the least squared error, by Lloyd's iteration.

    In turns each cell ends halfway between two levels, and each level becomes the mean of its cell,
    (phi(a) - phi(b)) / (Phi(b) - Phi(a)) for a cell [a, b).

    Args:
        even: keep the levels an even distance apart (Max's second case): the step becomes the least-squares
            fit to the means instead.
        tolerance: stop when no level moves by more.

    Returns:
        float64 [2^bits], ascending.
    """
    n = 1 << bits
    ranks = np.arange(n) - (n - 1) / 2
    # Many levels are best spaced like the cube root of the density, a Gaussian of variance 3.
    inverse_cdf = statistics.NormalDist(sigma=math.sqrt(3)).inv_cdf
    levels = np.array([inverse_cdf((i + 0.5) / n) for i in range(n)])
    while True:
        mass, mean = _cells(levels)
        moved = (mass * mean) @ ranks / (mass @ ranks**2) * ranks if even else mean
        if np.abs(moved - levels).max() < tolerance:
            return moved
        levels = moved


def _cells(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mass and mean of a unit Gaussian in the cell of each level."""
    ends = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    density = np.exp(-(ends**2) / 2) / math.sqrt(2 * math.pi)
    cumulative = np.array([math.erfc(-end / math.sqrt(2)) / 2 for end in ends])
    mass = np.diff(cumulative)
    return mass, -np.diff(density) / mass


# --- formats ---


@dataclass(frozen=True)
class Format:
    """A way to store rows of keys or values.

    Attributes:
        bits: stored bits per element, scales and biases included, by head_dim.
        round_trip: rows [T, D] in float64 to what is read back.
        fits: whether it can store heads of a head_dim.
    """

    name: str
    bits: Callable[[int], float]
    round_trip: Callable[[np.ndarray], np.ndarray]
    fits: Callable[[int], bool] = lambda head_dim: True


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to bf16, as float64."""
    return _float64(mx.array(x.astype(np.float32)).astype(mx.bfloat16))


def _float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def rotation(head_dim: int) -> np.ndarray:
    """R of `custom_kernels.turbo`, float64 [D, D]."""
    return _float64(turbo_format.rotation(head_dim))


def as_stored() -> Format:
    """The format of `TurboFullKVCache`: levels to a byte's precision, scales in bf16."""

    def round_trip(x: np.ndarray) -> np.ndarray:
        rows = mx.array(to_bf16(x).astype(np.float32)).astype(mx.bfloat16)
        return _float64(turbo_format.turbo_dequantize(*turbo_format.turbo_quantize(rows)))

    bits = turbo_format.BITS
    return Format(f"turbo as stored, {bits} bits", lambda head_dim: bits + SCALE_BITS / head_dim, round_trip)


def affine(bits: int, group_size: int, rotated: bool = False) -> Format:
    """Groups of `mx.quantize`, of a head as it is or rotated first."""

    def round_trip(x: np.ndarray) -> np.ndarray:
        turn = rotation(x.shape[-1]) if rotated else np.eye(x.shape[-1])
        rows = mx.array((to_bf16(x) @ turn.T).astype(np.float32)).astype(mx.bfloat16)
        codes, scales, biases = mx.quantize(rows, group_size, bits)
        # A fused kernel decodes in fp32 registers, so nothing is rounded to bf16 on the way.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return _float64(mx.dequantize(codes, scales, biases, group_size, bits)) @ turn

    return _affine(f"affine{', rotated' if rotated else ''}", bits, group_size, round_trip)


def refitted(bits: int, group_size: int) -> Format:
    """The format of `affine`, each code the nearest for the bias and scale as they are stored."""

    def round_trip(x: np.ndarray) -> np.ndarray:
        groups = to_bf16(x).reshape(-1, group_size)
        # The least element is a bf16 number: the bias is exact.
        bias = groups.min(-1, keepdims=True)
        scale = to_bf16((groups.max(-1, keepdims=True) - bias) / (2**bits - 1))
        codes = np.clip(np.round((groups - bias) / scale), 0, 2**bits - 1)
        return (codes * scale + bias).reshape(x.shape)

    return _affine("affine, refitted", bits, group_size, round_trip)


def _affine(name: str, bits: int, group_size: int, round_trip: Callable[[np.ndarray], np.ndarray]) -> Format:
    return Format(
        f"{name}, {bits} bits, groups of {group_size}",
        lambda head_dim: bits + 2 * SCALE_BITS / group_size,
        round_trip,
        lambda head_dim: head_dim % group_size == 0,
    )


def turbo(bits: int, even: bool = False, keep_norm: bool = True) -> Format:
    """Rotated rows with one scale and the levels of `gaussian_levels`.

    Args:
        even: levels an even distance apart.
        keep_norm: the scale gives back the row's norm, which levels that are means of their cells shorten;
            else it is the row's root mean square.
    """

    def round_trip(x: np.ndarray) -> np.ndarray:
        turn = rotation(x.shape[-1])
        y = to_bf16(x) @ turn.T
        rms = np.sqrt(np.mean(y * y, axis=-1, keepdims=True))
        levels = gaussian_levels(bits, even)
        found = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, y / rms)]
        scale = rms / np.sqrt(np.mean(found * found, axis=-1, keepdims=True)) if keep_norm else rms
        # Eight bits would notice the rounding of a bf16 scale.
        return scale.astype(np.float16).astype(np.float64) * found @ turn

    name = f"turbo{', even levels' if even else ''}{'' if keep_norm else ', rms scale'}, {bits} bits"
    return Format(name, lambda head_dim: bits + SCALE_BITS / head_dim, round_trip)


# --- data ---


@dataclass(frozen=True)
class Data:
    """Queries, keys and values of full layers, rotary embedding applied.

    Attributes:
        heads: for each KV head queries [G, QUERIES, D], keys [TOKENS, D] and values [TOKENS, D], float64.
    """

    name: str
    heads: list[tuple[np.ndarray, np.ndarray, np.ndarray]]

    @property
    def head_dim(self) -> int:
        return self.heads[0][1].shape[-1]


def _heads(
    qkv: mx.array, turns: mx.array, args: ModelArgs
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """What a layer attends with, from its projection [1, TOKENS, (heads + 2 KV heads) * D]."""
    kv_heads, positions = args.num_key_value_heads, mx.array([0], dtype=mx.int32)
    q, k, v = qkv_rope(qkv, positions, turns, n_heads=args.num_attention_heads, n_kv_heads=kv_heads)
    queries = _float64(q[0, :, -QUERIES:]).reshape(kv_heads, -1, QUERIES, args.head_dim)
    return list(zip(queries, _float64(k[0]), _float64(v[0]), strict=True))


def trained() -> Data:
    """The full layers of examples/tiny, in fp32, reading docstrings of Python's library."""
    args = ModelArgs.from_dict(json.loads((TINY / "config.json").read_text()))
    model = Model(args)
    weights = mx.load(str(TINY / "model.safetensors"))
    assert isinstance(weights, dict)
    model.load_weights([(name, w.astype(mx.float32)) for name, w in model.sanitize(weights).items()])
    text = "\n\n".join(str(source.__doc__) for source in (statistics, argparse, string.Template, json))
    ids = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text).ids
    if len(ids) < TOKENS:
        raise RuntimeError(f"the docstrings have {len(ids)} tokens; it must be {TOKENS} or more")

    residual: mx.array = model.model.embedding(mx.array([ids[:TOKENS]]))
    delta: mx.array | None = None
    heads = []
    for layer in model.layers:
        attention, norm = layer.self_attn, layer.input_layernorm
        if layer.layer_type == FULL:
            _, x = add_rms_norm(residual, delta, norm.weight, eps=norm.eps)
            heads += _heads(attention.q_k_v_proj(x), attention.heads.turns, args)
        step = plan(attention.heads, None, mx.array([0], dtype=mx.int32), TOKENS, mx.float32)
        residual, delta = layer(residual, delta, step)
    return Data("trained", heads)


def random_4b(outliers: bool) -> Data:
    """A full layer of the 4B shape, random weights and random normed hidden states.

    Args:
        outliers: multiply OUTLIERS channels of each KV head's key projection by OUTLIER_FACTOR.
    """
    args = ModelArgs.from_dict(SHAPES["4b"])
    width = args.q_size + 2 * args.kv_size
    rng = np.random.default_rng(SEED)
    weight = rng.standard_normal((width, args.hidden_size), dtype=np.float32) * np.float32(0.02)
    x = rng.standard_normal((TOKENS, args.hidden_size), dtype=np.float32)
    if outliers:
        for head in range(args.num_key_value_heads):
            channels = rng.choice(args.head_dim, OUTLIERS, replace=False)
            weight[args.q_size + head * args.head_dim + channels] *= OUTLIER_FACTOR
    # NumPy's product: that of mlx takes half a minute on a CPU.
    qkv = mx.array(x @ weight.T)[None]
    return Data("outliers" if outliers else "random", _heads(qkv, rope_for(args, FULL), args))


# --- errors ---


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [G, QUERIES, T], 0 where a key is not seen, and outputs [G, QUERIES, D] of the last queries."""
    tokens, head_dim = k.shape
    seen = np.arange(tokens) <= np.arange(tokens - q.shape[1], tokens)[:, None]
    logits = np.where(seen, q @ k.T / math.sqrt(head_dim), 0.0)
    weights = np.exp(logits - logits.max(-1, keepdims=True)) * seen
    return logits, weights / weights.sum(-1, keepdims=True) @ v


def errors(data: Data, formats: Sequence[Format]) -> Iterator[tuple[float, float] | None]:
    """Relative errors of logits and outputs for each format, None where it does not fit."""
    exact = [attend(*head) for head in data.heads]
    for form in formats:
        if not form.fits(data.head_dim):
            yield None
            continue
        found = []
        for (q, k, v), wanted in zip(data.heads, exact, strict=True):
            got = attend(q, form.round_trip(k), form.round_trip(v))
            found.append([_rms(a - b) / _rms(b) for a, b in zip(got, wanted, strict=True)])
        logits, outputs = np.mean(found, axis=0)
        yield float(logits), float(outputs)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x)))


# --- tables ---


def main() -> None:
    """Measure and print."""
    datasets = [trained(), random_4b(outliers=False), random_4b(outliers=True)]
    # Formats that differ in the width of a code alone.
    families = [[affine(bits, group_size) for bits in AFFINE_BITS] for group_size in GROUP_SIZES]
    families.append([refitted(bits, 64) for bits in AFFINE_BITS])
    turbos = [turbo(bits) for bits in TURBO_BITS]
    formats = [
        Format("bf16", lambda head_dim: float(SCALE_BITS), to_bf16),
        *(form for family in families for form in family),
        *(affine(bits, 64, rotated=True) for bits in (3, 4, 8)),
        *turbos,
        as_stored(),
        *(turbo(bits, even=True) for bits in (3, 4, 8)),
        *(turbo(bits, keep_norm=False) for bits in (3, 4)),
    ]
    results = [dict(zip(formats, errors(data, formats), strict=True)) for data in datasets]

    titles = [f"{data.name}: {what}" for data in datasets for what in ("logits", "output")]
    print(f"Errors in percent, {TOKENS} keys. Bits per element for D = 64 (trained) and 256 (the others).\n")
    _print_header(["format", "bits, D = 64", "bits, D = 256", *titles])
    for form in formats:
        bits = [f"{form.bits(head_dim):.2f}" if form.fits(head_dim) else "–" for head_dim in (64, 256)]
        cells = [_percent(error) for found in results for error in found[form] or (None, None)]
        _print_row([form.name, *bits, *cells])

    print(
        "\nError of affine over that of turbo, at the bits per element of turbo: over 1, turbo is better.\n"
        "The best of all `affine` that are not rotated; between two widths of a code log(error) is taken as\n"
        "linear in the bits.\n"
    )
    _print_header(["format", *titles])
    for form in turbos[1:]:
        cells = []
        for data, found in zip(datasets, results, strict=True):
            curves = [[(f, e) for f in family if (e := found[f])] for family in families]
            for i, error in enumerate(found[form] or ()):
                best = min(_at(form.bits(data.head_dim), data, curve, i) for curve in curves if curve)
                cells.append(f"{best / error:.2f}")
        _print_row([form.name, *cells])


def _at(bits: float, data: Data, curve: list[tuple[Format, tuple[float, float]]], which: int) -> float:
    """An error of formats in the order of their bits, interpolated at a number of bits."""
    at = [form.bits(data.head_dim) for form, _ in curve]
    return math.exp(np.interp(bits, at, [math.log(error[which]) for _, error in curve]))


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{100 * error:.3g}"


def _print_header(cells: Sequence[str]) -> None:
    _print_row(cells)
    _print_row(["---"] + ["--:"] * (len(cells) - 1))


def _print_row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
