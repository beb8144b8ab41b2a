"""Calls with more tokens than a grid has places for."""

from __future__ import annotations

from unittest.mock import patch

import mlx.core as mx

from spark25_mlx.custom_kernels import backend
from spark25_mlx.custom_kernels.geglu import geglu
from spark25_mlx.custom_kernels.head_gate import head_gate, project_gate
from spark25_mlx.custom_kernels.qkv_rope import qkv_rope
from spark25_mlx.custom_kernels.rope import rope_turns
from tests.kernels.backends import recorded

TURNS = rope_turns(1e4, 8)


def call_all(tokens: int) -> None:
    geglu(mx.zeros((tokens, 64)))
    head_gate(mx.zeros((1, 1, tokens, 32)), mx.zeros((1, tokens, 1)), mode="silu")
    project_gate(mx.zeros((1, 1, tokens, 32)), mx.zeros((1, tokens, 8)), mx.zeros((1, 8)), mode="sigmoid")
    qkv_rope(mx.zeros((1, tokens, 96)), mx.array([0]), TURNS, n_heads=1, n_kv_heads=1)


def test_more_tokens_than_cuda_has_threadgroups_along_an_axis() -> None:
    """References run instead; Metal has no such limit."""
    names = ["geglu", "head_gate", "project_gate", "qkv_rope"]
    with recorded() as launches:
        call_all(65_535)
        assert [name for name, _ in launches] == names
        launches.clear()
        call_all(65_536)
        assert launches == []
        with patch.object(backend, "backend_name", lambda: "metal"):
            call_all(65_536)
        assert [name for name, _ in launches] == names
