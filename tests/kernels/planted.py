"""Bugs planted into the kernels, and what catches each; `python -m tests.metal_sim.planted` shows the table.

A row replaces a text of the kernel or of its headers, which are read without comments and indentation. Its
subject launches the kernel on small inputs and asserts the values against float64.

A launch that does not bind `after` has no text to replace, and launches run in order here, whatever they
bind: the tests named `test_after_is_bound` look at the launch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx

from spark25_mlx.custom_kernels.add_rms_norm import add_rms_norm
from spark25_mlx.custom_kernels.backend import Factory
from spark25_mlx.custom_kernels.decode_attention import TURBO
from spark25_mlx.custom_kernels.decode_linear import linear_add, norm_geglu, norm_qkv
from spark25_mlx.custom_kernels.geglu import geglu
from spark25_mlx.custom_kernels.head_gate import head_gate, project_gate
from spark25_mlx.custom_kernels.qkv_rope import qkv_rope
from spark25_mlx.custom_kernels.rope import rope_table
from tests.kernels import (
    test_add_rms_norm,
    test_decode_attention,
    test_decode_linear,
    test_geglu,
    test_head_gate,
    test_qkv_rope,
    test_quantised_attention,
    test_rope,
)
from tests.kernels.backends import SIMULATOR, Backend, through
from tests.kernels.rounding import assert_rounded_once, random, to_float64
from tests.kernels.test_decode_attention import Case
from tests.kernels.test_decode_linear import random_weight
from tests.metal_sim import Kind
from tests.metal_sim.planted import NOTHING, WRONG_VALUES, Planted, Subject

_SIMULATOR = Backend(SIMULATOR)


def _add_rms_norm() -> None:
    for scale in (3.0, 1e-3):
        residual, delta = (
            random((2, 1, 161), mx.float32, 0, scale),
            random((2, 1, 161), mx.bfloat16, 1, scale),
        )
        weight = random((161,), mx.bfloat16, 2)
        test_add_rms_norm.assert_added_and_normed(add_rms_norm, residual, delta, weight, 1e-6)


def _geglu() -> None:
    for dtype in (mx.bfloat16, mx.float32):
        both = random((3, 600), dtype, 0, 2.0)
        z, u = to_float64(both)[:, :300], to_float64(both)[:, 300:]
        error = test_geglu.fp32_error(z, u)
        for out in (geglu(both), geglu(both[:, :300], both[:, 300:])):
            assert_rounded_once(out, test_geglu.oracle(z, u), dtype, error)
    shut = geglu(mx.array([[-mx.inf]]), mx.ones((1, 1)))
    assert to_float64(shut).item() == 0.0


def _head_gate() -> None:
    x, scores = random((2, 3, 5, 32), mx.bfloat16, 0), random((2, 5, 3), mx.bfloat16, 1, 3.0)
    for mode in ("sigmoid", "silu"):
        test_head_gate.assert_gated(head_gate, x, scores, mode)
    shut = head_gate(mx.ones((1, 1, 1, 32)), mx.array([[[-mx.inf]]]), mode="silu")
    assert to_float64(shut).tolist() == [[[0.0] * 32]]


def _project_gate() -> None:
    x, hidden = random((2, 3, 5, 96), mx.bfloat16, 0), random((2, 5, 130), mx.bfloat16, 1)
    weight, bias = random((3, 130), mx.bfloat16, 2, 0.2), random((3,), mx.bfloat16, 3)
    test_head_gate.assert_projected_and_gated(project_gate, x, hidden, weight, bias, "silu")


def _rope_table() -> None:
    test_rope.assert_table(rope_table, [1_048_573, 5], 3, 24)


def _qkv_rope() -> None:
    for dtype in (mx.bfloat16, mx.float32):
        qkv = random((2, 3, 8 * 64), dtype, 0)
        test_qkv_rope.assert_split_and_rotated(qkv_rope, qkv, [1_048_573, 5], 24, 4, 2)


def _qkv_rope_append() -> None:
    append = test_qkv_rope.appending(_SIMULATOR)
    for capacity, positions, lengths in ((7, [5, 1_000_003], [3, 2]), (2, [1, 0], [3, 3])):
        qkv = random((2, 3, 6 * 32), mx.bfloat16, 0)
        test_qkv_rope.assert_appended(append, qkv, capacity, positions, lengths, 8, 2, 2)


def _decode_attention(*splits: int) -> None:
    ring = Case([2, 9, 57], L=3, n_heads=2, dims=32, capacity=11, window=9)
    full = Case([0, 9, 100], L=2, n_heads=4, n_kv_heads=2, dims=8, capacity=104, dtype=mx.bfloat16)
    many_heads = Case([40], n_heads=8, D=128, dims=16, mode="silu", dtype=mx.float16)
    # A simdgroup goes through its keys several times.
    rounds = Case([1100], n_heads=2, capacity=1101)
    for case in (ring, full, many_heads, rounds):
        for n in splits:
            test_decode_attention.check_call(_SIMULATOR, case, n)


def _quantised_attention(group: int) -> None:
    small = test_quantised_attention.Case(
        [9, 0, 40], L=2, n_heads=4, n_kv_heads=2, splits=(1, 8), group=group
    )
    wide = replace(small, D=256, bits=4, dtype=mx.float16)
    many_heads = replace(small, n_heads=8, n_kv_heads=1)
    for case in (small, wide, many_heads):
        test_quantised_attention.check(_SIMULATOR, case)


def _matrix_attention() -> None:
    _quantised_attention(64)
    # A simdgroup goes through its keys several times.
    rounds = test_quantised_attention.Case([300], n_heads=3, capacity=301, group=64, splits=(2,))
    test_quantised_attention.check(_SIMULATOR, rounds)
    test_quantised_attention.check_magnitudes(_SIMULATOR, mx.bfloat16, 8)


def _turbo_attention(*splits: int) -> None:
    bits, group = TURBO
    small = test_quantised_attention.Case(
        [9, 0, 40], L=2, n_heads=4, n_kv_heads=2, splits=splits, bits=bits, group=group
    )
    # Enough queries that one of them would show it if they were rounded to halves.
    many = replace(small, positions=[16, 16], L=4, n_heads=12, capacity=21, mode="silu", dtype=mx.float16)
    for case in (small, replace(small, D=256, dtype=mx.float16), many):
        test_quantised_attention.check(_SIMULATOR, case)


def _norm_qkv(bits: int, group: int) -> None:
    weight = random_weight(35, 192, mx.bfloat16, bits, group, 1)
    gate_weight = random((5, 192), mx.bfloat16, 2, 192**-0.5)
    for scale in (3.0, 1e-3):
        test_decode_linear.assert_qkv(norm_qkv, weight, gate_weight, scale)


def _norm_geglu(bits: int, group: int) -> None:
    gate, up = (random_weight(13, 640, mx.float16, bits, group, seed) for seed in (1, 2))
    test_decode_linear.assert_geglu(norm_geglu, gate, up, mx.float16)


def _linear_add(bits: int, group: int) -> None:
    weight = random_weight(35, 192, mx.bfloat16, bits, group, 1)
    test_decode_linear.assert_added(linear_add, weight, mx.bfloat16)


def _subject(name: str, test: Callable[[], None]) -> Subject:
    def run(factory: Factory) -> None:
        with through(factory):
            test()

    return Subject(name, run)


# One for each kernel; the attention and the merge of its parts are one call.
_TESTS: dict[str, Callable[[], None]] = {
    "add_rms_norm": _add_rms_norm,
    "geglu": _geglu,
    "head_gate": _head_gate,
    "project_gate": _project_gate,
    "rope_table": _rope_table,
    "qkv_rope": _qkv_rope,
    "qkv_rope_append": _qkv_rope_append,
    "decode_attention": partial(_decode_attention, 8),
    "decode_attention_final": partial(_decode_attention, 1),
    "decode_attention_quantised": partial(_quantised_attention, 32),
    "decode_attention_matrix": _matrix_attention,
    "decode_attention_turbo": partial(_turbo_attention, 1, 8),
    "merge_gate_turbo": partial(_turbo_attention, 8),
    "merge_gate": partial(_decode_attention, 8, 64),
    "norm_qkv": partial(_norm_qkv, 16, 0),
    "norm_qkv_quantised": partial(_norm_qkv, 4, 32),
    "norm_geglu": partial(_norm_geglu, 16, 0),
    "norm_geglu_quantised": partial(_norm_geglu, 8, 64),
    "linear_add": partial(_linear_add, 16, 0),
    "linear_add_quantised": partial(_linear_add, 8, 32),
}
SUBJECTS: dict[str, Subject] = {name: _subject(name, test) for name, test in _TESTS.items()}

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
_REVERSE = {"order": "reverse"}

TABLE: tuple[Planted, ...] = (
    # Synchronisation
    Planted("add_rms_norm", "no barrier before the sum", _BARRIER, "", Kind.UNINITIALISED),
    Planted("add_rms_norm", "no barrier before the sum, other order", _BARRIER, "", Kind.RACE, _REVERSE),
    Planted("add_rms_norm", "barrier of the wrong memory", "mem_threadgroup", "mem_device", Kind.RACE),
    Planted("add_rms_norm", "barrier that some threads skip", _BARRIER,
            "if (thread_index < 40) " + _BARRIER, Kind.BARRIER),
    Planted("project_gate", "no barrier before the sum", _BARRIER, "", Kind.RACE, _REVERSE),
    Planted("decode_attention", "no barrier after the maxima", _BARRIER + "#pragma", "#pragma",
            Kind.UNINITIALISED),
    Planted("decode_attention", "no barrier between two heads", _BARRIER + "}", "}", Kind.RACE),
    Planted("decode_attention", "no barrier before the outputs' sum", _BARRIER + "const uint head",
            "const uint head", Kind.RACE, _REVERSE),
    Planted("decode_attention", "every tile writes the keys, told to mind", " && tile % (TILES / KV) == 0",
            "",
            Kind.RACE, {"same_value_races": True}),
    Planted("merge_gate", "no barrier before the sum", _BARRIER + "const float gate", "const float gate",
            Kind.RACE),
    Planted("linear_add", "no barrier before the parts' sum", _BARRIER, "", Kind.UNINITIALISED),
    Planted("linear_add", "every part writes", "if (part != 0) continue;\n", "", Kind.OUT_OF_BOUNDS),
    Planted("qkv_rope_append", "later tokens overwrite in any order", " || l + capacity < valid", "",
            Kind.RACE),
    # Windows and rings
    Planted("decode_attention", "window one key too long: a row that is being written",
            "? position + 1 - WINDOW",
            "? position - WINDOW", Kind.RACE),
    Planted("decode_attention", "window one key too short", "? position + 1 - WINDOW",
            "? position + 2 - WINDOW",
            WRONG_VALUES),
    Planted("decode_attention", "rows not reduced to the ring", "begin % capacity", "begin",
            Kind.OUT_OF_BOUNDS),
    Planted("decode_attention_final", "no wrap within a split", "row >= capacity ? row - capacity : row",
            "row", Kind.OUT_OF_BOUNDS),
    Planted("decode_attention_final", "neighbours around the ring's end", " && ROW(at) + U <= capacity", "",
            Kind.OUT_OF_BOUNDS),
    Planted("decode_attention", "neighbours beyond the last key", "at + U <= end && ", "", Kind.RACE),
    Planted("decode_attention", "new key at the row of the first token", "(offset + t) % capacity",
            "offset % capacity", Kind.RACE),
    Planted("decode_attention", "ring one row shorter", "(offset + t) % capacity",
            "(offset + t) % (capacity - 1)", Kind.RACE),
    Planted("decode_attention", "tokens see the future", "split == 0 && simd <= l",
            "split == 0 && simd < L", Kind.UNINITIALISED),
    Planted("decode_attention", "token does not see itself", "float score = simd_sum(dot)",
            "float score = -1e3f", WRONG_VALUES),
    Planted("decode_attention", "every split adds the new keys", "split == 0", "true", WRONG_VALUES),
    Planted("decode_attention", "last keys of a split lost", "(count + splits - 1) / splits",
            "count / splits", WRONG_VALUES),
    Planted("decode_attention", "window of the first token for all", "position = offset + l",
            "position = offset", WRONG_VALUES),
    Planted("decode_attention", "phases of the first token for all",
            "entry = token * (R / 2)", "entry = size_t(b) * L * (R / 2)", WRONG_VALUES),
    Planted("rope_table", "position of the first token for all", "uint(positions[b]) + l",
            "uint(positions[b])",
            WRONG_VALUES),
    Planted("rope_table", "first position of the first sequence for all", "starts[b] = positions[b]",
            "starts[b] = positions[0]", WRONG_VALUES),
    Planted("rope_table", "the other entries left as they are", "starts[j] = 0", "", Kind.UNWRITTEN),
    Planted("rope_table", "no bounds check", "if (j >= R / 2) return;\n", "", Kind.OUT_OF_BOUNDS),
    Planted("rope_table", "cosines for sines", "sines[at] = s", "sines[at] = c", WRONG_VALUES),
    Planted("decode_attention", "position of the first token for all", "position = offset + l",
            "position = offset", WRONG_VALUES),
    Planted("qkv_rope_append", "ring one row longer", "position % capacity", "position % (capacity + 1)",
            WRONG_VALUES),
    Planted("qkv_rope_append", "padding is written", "l >= valid || ", "", WRONG_VALUES),
    Planted("qkv_rope_append", "values written over keys", "is_key ? keys : values", "is_key ? keys : keys",
            Kind.RACE),
    Planted("decode_attention_final", "no barrier after the maxima", _BARRIER + "#pragma", "#pragma",
            Kind.UNINITIALISED),
    Planted("decode_attention_final", "window one key too long: a row that is being written",
            "? position + 1 - WINDOW", "? position - WINDOW", Kind.RACE),
    Planted("decode_attention_final", "values of the first part for all", "FETCH(VALUES, PARTS, part, v)",
            "FETCH(VALUES, PARTS, 0, v)", WRONG_VALUES),
    Planted("decode_attention_final", "all parts' output in one place", "+ part * (D / PARTS) + d]", "+ d]",
            Kind.RACE),
    Planted("decode_attention_final", "new values of the first part for all", "= (part * 32 + lane) * VN",
            "= lane * VN", WRONG_VALUES),
    Planted("decode_attention_final", "keys written by every part, told to mind", "if (write && part == 0)",
            "if (write)", Kind.RACE, {"same_value_races": True}),
    Planted("decode_attention_final", "gate of the first head", "* H + head]", "* H]", WRONG_VALUES),
    Planted("decode_attention_final", "weights not normalised", "sum / sum_of_weights", "sum", WRONG_VALUES),
    Planted("decode_attention_final", "heads and tokens exchanged", "((size_t(b) * L + l) * H + head) * D",
            "((size_t(b) * H + head) * L + l) * D", WRONG_VALUES),
    # Quantised caches
    Planted("decode_attention_quantised", "scale of the row before", "share.scale = float(scales[group])",
            "share.scale = float(scales[group - (row > 0 ? 32 * N / GROUP : 0)])", WRONG_VALUES),
    Planted("decode_attention_quantised", "bias of the neighbouring group",
            "share.bias = float(biases[group])", "share.bias = float(biases[group ^ 1])", WRONG_VALUES),
    Planted("decode_attention_quantised", "codes high bits first", "const int at = i * BITS % 32",
            "const int at = 24 - i * BITS % 32", WRONG_VALUES),
    Planted("decode_attention_quantised", "bias forgotten", "share.bias - scale", "-scale", WRONG_VALUES),
    Planted("decode_attention_quantised", "first lane's half of a shared word for all",
            "share.words[0] >> (lane * N * BITS % 32)", "share.words[0]", WRONG_VALUES),
    Planted("decode_attention_quantised", "range of a lane for that of its group",
            "mask < GROUP / N", "mask < 1", WRONG_VALUES),
    Planted("decode_attention_quantised", "codes of one lane in a shared word",
            "share.words[0] |= simd_shuffle_xor(share.words[0], mask)", "share.words[0] |= 0", WRONG_VALUES),
    Planted("decode_attention_quantised", "every lane writes a shared word", "if (write && shift == 0)",
            "if (write)", NOTHING),
    Planted("decode_attention_quantised", "codes cut off, not rounded", "metal::rint((x[i] - bias) / scale)",
            "float(int((x[i] - bias) / scale))", WRONG_VALUES),
    Planted("decode_attention_quantised", "edge of smaller magnitude met",
            "metal::abs(low) > metal::abs(high)", "metal::abs(low) < metal::abs(high)", WRONG_VALUES),
    Planted("decode_attention_quantised", "scale of any sign", "if (!from_low) scale = -scale;\n", "",
            WRONG_VALUES),
    Planted("decode_attention_quantised", "seen before it was quantised",
            "decode(codes, scales, biases, lane, share, x);\n}", "}", WRONG_VALUES),
    Planted("decode_attention_quantised", "every tile writes the rows, told to mind",
            " && tile % (TILES / KV) == 0", "", Kind.RACE, {"same_value_races": True}),
    Planted("decode_attention_quantised", "rows of the keys' buffer for the values",
            "quantise((device uint*)values", "quantise((device uint*)keys", WRONG_VALUES),
    # Products of matrices
    Planted("decode_attention_matrix", "what weights lose as halves forgotten", "? halves : rest",
            "? halves : 0", WRONG_VALUES),
    Planted("decode_attention_matrix", "what weights lose counted in full", "factor / UNIT / REST",
            "factor / UNIT", WRONG_VALUES),
    Planted("decode_attention_matrix", "keys past the end in the second half", "now + 8 * y + row < end",
            "now + row < end", WRONG_VALUES),
    Planted("decode_attention_matrix", "rows past the end are read", "base + ROW(metal::min(at, end - 1))",
            "base + ROW(at)", Kind.RACE),
    Planted("decode_attention_matrix", "queries in the order of the dimensions",
            "(i / PAIRS * 2 + row % 2) * PAIRS + i % PAIRS", "2 * i + row % 2", WRONG_VALUES),
    Planted("decode_attention_matrix", "sums of one query head for both", "+= high_half(halves)",
            "+= low_half(halves)", WRONG_VALUES),
    Planted("decode_attention_matrix", "scales of the other eight keys", "raw_scales[y], scales[y]",
            "raw_scales[1 - y], scales[y]", WRONG_VALUES),
    Planted("decode_attention_matrix", "scales of the other eight values", "FETCH_SCALES(value, v_scales[y]",
            "FETCH_SCALES(value, v_scales[1 - y]", WRONG_VALUES),
    Planted("decode_attention_matrix", "biases of one lane's keys",
            "bias_sums[g][x] = column_sum(bias_sums[g][x])", "bias_sums[g][x] *= 1.0f", WRONG_VALUES),
    Planted("decode_attention_matrix", "biases keep the old maximum", "bias_sums[g][x] *= shrink[x]",
            "bias_sums[g][x] *= 1.0f", WRONG_VALUES),
    Planted("decode_attention_matrix", "outputs shrink by the other column's maximum", "shrink[n % 2]",
            "shrink[n / 2]", WRONG_VALUES),
    Planted("decode_attention_matrix", "new token counted by each row", "row == 0 ? 1.0f : 0.0f", "1.0f",
            WRONG_VALUES),
    Planted("decode_attention_matrix", "value of the new token read too early",
            "simdgroup_barrier(mem_flags::mem_threadgroup);\nif (column < 4)", "if (column < 4)", Kind.RACE),
    Planted("decode_attention_matrix", "both parts of an output at once",
            "simdgroup_barrier(mem_flags::mem_threadgroup);  ", "  ", Kind.RACE),
    Planted("decode_attention_matrix", "codes of the other half of a word", "upper ? (first >> 16)",
            "!upper ? (first >> 16)", WRONG_VALUES),
    Planted("decode_attention_matrix", "sums over half of a column's rows",
            "mask <= 16; mask = mask == 2 ? 4 : mask * 4) x +=",
            "mask < 16; mask = mask == 2 ? 4 : mask * 4) x +=", WRONG_VALUES),
    Planted("decode_attention_matrix", "left operand's tiles exchanged", "a[2 * j + i]", "a[2 * i + j]",
            WRONG_VALUES),
    # Rotated rows
    Planted("decode_attention_turbo", "queries and keys rotated without signs",
            "rotated[r][lane + 32 * i] * sign_of(lane + 32 * i)", "rotated[r][lane + 32 * i]", WRONG_VALUES),
    Planted("decode_attention_turbo", "what queries lose as halves forgotten",
            "first ? x + other / times : other + x / times", "first ? x : other", WRONG_VALUES),
    Planted("decode_attention_turbo", "values not rotated", "hadamard<N>(lane, value);\n", "", WRONG_VALUES),
    Planted("decode_attention_turbo", "rotation without its last exchange",
            "for (uint mask = 1; mask < 32; mask *= 2) {\nconst float other",
            "for (uint mask = 1; mask < 16; mask *= 2) {\nconst float other", WRONG_VALUES),
    Planted("decode_attention_turbo", "scale of the values for the keys", "-MIDDLE * scales[y][g]",
            "-MIDDLE * scales[0][g]", WRONG_VALUES),
    Planted("decode_attention_turbo", "middle half a step off", "MIDDLE = 127.5f", "MIDDLE = 128.0f",
            WRONG_VALUES),
    Planted("decode_attention_turbo", "complement forgotten", "? 255u - byte : byte", "? byte : byte",
            WRONG_VALUES),
    Planted("decode_attention_turbo", "codes of the other half word", "i % 2 * 16", "(1 - i % 2) * 16",
            WRONG_VALUES),
    Planted("decode_attention_turbo", "threshold at the level",
            "float((both & 0xffu) + ((both >> 8) & 0xffu))", "float((both & 0xffu) + (both & 0xffu))",
            WRONG_VALUES),
    Planted("decode_attention_turbo", "scale of the deviation", "squares / simd_sum(found)",
            "squares / (float(32 * N) * STEPS * STEPS)", WRONG_VALUES),
    Planted("decode_attention_turbo", "every lane its own scale", "squares / simd_sum(found)",
            "squares / (found * 32.0f)", WRONG_VALUES),
    Planted("decode_attention_turbo", "new token seen before it was stored",
            "x[i] = float(levels_of(code) & 0xffu) - MIDDLE;\nfound += x[i] * x[i];",
            "const float y = float(levels_of(code) & 0xffu) - MIDDLE;\nfound += y * y;", WRONG_VALUES),
    Planted("merge_gate_turbo", "not rotated back", "hadamard<N>(lane, sums);\n", "", WRONG_VALUES),
    Planted("merge_gate_turbo", "rotated back without signs", "sums[i] * sign_of(d)", "sums[i]",
            WRONG_VALUES),
    Planted("merge_gate_turbo", "no barrier before the sum", _BARRIER, "", Kind.UNINITIALISED),
    # Strides and indices
    Planted("geglu", "stride of one half", "row * (2 * I) + i", "row * I + i", WRONG_VALUES),
    Planted("geglu", "no bounds check", "if (i >= I) return;\n", "", Kind.OUT_OF_BOUNDS),
    Planted("add_rms_norm", "no bounds check", "if (i < H) x[", "x[", Kind.OUT_OF_BOUNDS),
    Planted("add_rms_norm", "last element left out", "if (i < H) x[", "if (i < H - 1) x[", Kind.UNWRITTEN),
    Planted("head_gate", "heads and tokens exchanged", "(token / L * H + head) * L + token % L",
            "(token / L * L + token % L) * H + head", WRONG_VALUES),
    Planted("qkv_rope", "values taken for keys", "head < H + KV;", "head < H + KV + 1;", Kind.RACE),
    Planted("qkv_rope", "neighbours as pairs", "pair + R / 2 : first + 1", "pair + 1 : first + 1", Kind.RACE),
    Planted("qkv_rope", "row without the values", "(H + 2 * KV) + head", "(H + KV) + head", WRONG_VALUES),
    Planted("qkv_rope", "position of the first token for all", "uint(positions[b]) + l", "uint(positions[b])",
            WRONG_VALUES),
    Planted("merge_gate", "statistics of the neighbouring part", "stats[2 * (first + lane + 32 * i) + 1]",
            "stats[2 * (first + lane + 32 * i + 1) + 1]", Kind.OUT_OF_BOUNDS),
    Planted("merge_gate", "first part only", "j < splits; j += SIMDS", "j < 1; j += SIMDS", WRONG_VALUES),
    Planted("merge_gate", "no more than 32 parts", "j < 32 ? low : high", "low", WRONG_VALUES),
    Planted("linear_add", "rows beyond the matrix", "metal::min(first_row + r, rows - 1)",
            "(first_row + r)",
            Kind.OUT_OF_BOUNDS),
    Planted("norm_qkv", "gate rows beyond their matrix", "metal::min(first_row + r, rows - 1)",
            "(first_row + r)", Kind.OUT_OF_BOUNDS),
    Planted("norm_qkv", "last columns not cut off", "if (from >= SEGMENT) continue;\n", "",
            Kind.OUT_OF_BOUNDS),
    Planted("norm_qkv_quantised", "scale of the neighbouring group", "float(scales[element / GROUP])",
            "float(scales[element / GROUP + 1])",
            Kind.OUT_OF_BOUNDS),
    Planted("norm_qkv_quantised", "codes high bits first", "x[PER_WORD * j + i]",
            "x[PER_WORD * j + PER_WORD - 1 - i]",
            WRONG_VALUES),
    Planted("norm_qkv", "no barrier before the norm is used", _BARRIER + "sum = 0.0f;", "sum = 0.0f;",
            Kind.UNINITIALISED),
    Planted("norm_qkv", "normed values in their own order", "within % V * 32 + within / V", "within",
            Kind.UNINITIALISED),
    Planted("norm_geglu_quantised", "up projection's scales for the gate", "float(scales[",
            "float(up_scales[",
            WRONG_VALUES),
    Planted("norm_geglu_quantised", "bias of a group added once a lane", "* x_sum", "* 1.0f", WRONG_VALUES),
    Planted("linear_add", "parts start at the wrong column", "part * SEGMENT + from", "part * 32 * V + from",
            Kind.OUT_OF_BOUNDS),
    Planted("norm_geglu", "gate and up exchanged", "gelu(sums[0][r]) * sums[1][r]",
            "gelu(sums[1][r]) * sums[0][r]",
            WRONG_VALUES),
    Planted("linear_add_quantised", "biases of the groups forgotten", "code_bias[a][0][r] * x_sum", "0.0f",
            WRONG_VALUES),
    # Numbers
    Planted("add_rms_norm", "epsilon forgotten", " + EPS", "", WRONG_VALUES),
    Planted("norm_qkv", "epsilon forgotten", " + EPS", "", WRONG_VALUES),
    Planted("add_rms_norm", "rounded before the weight", "float(weight[i]) * (values[j] * scale)",
            "float(weight[i]) * float(T(values[j] * scale))", WRONG_VALUES),
    Planted("add_rms_norm", "residual stream rounded to the dtype", "h[row + i] = values[j]",
            "h[row + i] = float(T(values[j]))", WRONG_VALUES),
    Planted("add_rms_norm", "uninitialised sum", "float squares = 0.0f;", "float squares;",
            Kind.UNINITIALISED),
    Planted("geglu", "wrong digit of a coefficient", "p * t + 1.48851587f", "p * t + 1.48861587f",
            WRONG_VALUES),
    Planted("geglu", "NaN for a gate of -inf", "tail == 0.0f ? 0.0f : ", "", WRONG_VALUES),
    Planted("head_gate", "NaN for a gate that is shut", "silu && gate != 0.0f", "silu", WRONG_VALUES),
    Planted("qkv_rope", "phase in fp32", "float(as_type<int>(phase)) * 1.4629180792671596e-9f",
            "float(position) * (float(turn) * 3.4061216e-19f)", WRONG_VALUES),
    Planted("qkv_rope", "turned backwards", "x1 * c - x2 * s", "x1 * c + x2 * s", WRONG_VALUES),
    Planted("decode_attention", "sum of weights not rescaled", "lane_total * shrink + weight",
            "lane_total + weight", WRONG_VALUES),
    Planted("decode_attention", "outputs not rescaled", "o[h][i] *= factor", "o[h][i] *= 1.0f", WRONG_VALUES),
    Planted("decode_attention", "sum over half of the lanes", "score += simd_shuffle_xor(score, mask)",
            "score += 0.0f", WRONG_VALUES),
    Planted("decode_attention", "weight of another key", "simd_shuffle(weight, SHARE * (h * U + u))",
            "simd_shuffle(weight, h * U + u)", WRONG_VALUES),
    Planted("decode_attention", "maximum from beyond the simdgroup", "simd_shuffle(shrink, SHARE * h * U)",
            "simd_shuffle(shrink, 2 * SHARE * h * U)", Kind.SIMD_LANE),
    Planted("decode_attention", "scale of head_dim forgotten", "metal::precise::rsqrt(float(D))", "1.0f",
            WRONG_VALUES),
    Planted("decode_attention", "uninitialised maximum", "float lane_best = -1e30f;", "float lane_best;",
            WRONG_VALUES),
    Planted("merge_gate", "parts not rescaled", "used ? metal::fast::exp2(best[i] - most)", "used ? 1.0f",
            WRONG_VALUES),
    # What is no Metal
    Planted("add_rms_norm", "no cast to bfloat", "T(float(weight[i]) * (values[j] * scale))",
            "float(weight[i]) * (values[j] * scale)", Kind.IMPLICIT_BFLOAT),
    Planted("qkv_rope", "pointer without address space", "device T* out;", "T* out;", Kind.ADDRESS_SPACE),
    Planted("qkv_rope_append", "keys written without the cast", "(device T*)(is_key ? keys : values)",
            "(is_key ? keys : values)", Kind.ADDRESS_SPACE),
    Planted("norm_qkv", "x without address space", "const thread float* x", "const float* x",
            Kind.ADDRESS_SPACE),
    Planted("geglu", "erf, which Metal lacks", "metal::precise::exp(p - a * a)", "metal::erf(p - a * a)",
            Kind.COMPILE),
    Planted("decode_attention", "threadgroup memory exhausted", "threadgroup float all_o[SIMDS][",
            "threadgroup float all_o[SIMDS * 64][", Kind.THREADGROUP_MEMORY),
    Planted("decode_attention", "double", "float sum = 0.0f;\nfor (uint j = 0; j < SIMDS; ++j) sum += all_o",
            "double sum = 0;\nfor (uint j = 0; j < SIMDS; ++j) sum += all_o", Kind.DIALECT),
    # Not caught: within what rounding may do
    Planted("geglu", "last digits of a coefficient exchanged", "p * t + 1.48851587f", "p * t + 1.48851578f",
            NOTHING),
    Planted("qkv_rope", "phase read as unsigned, of half the resolution", "as_type<int>(phase)", "phase",
            NOTHING),
    Planted("decode_attention", "query not rounded as the keys are",
            "rotated[r][d] = float(T(x))", "rotated[r][d] = is_key ? float(T(x)) : x", NOTHING),
)  # fmt: skip
