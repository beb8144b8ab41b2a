"""The model under mlx-lm's convert and lora commands, on the trained tiny checkpoint."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm.utils import load_model

import spark25_mlx
from spark25_mlx.model import Model

TINY = Path(__file__).parents[2] / "examples" / "tiny"


def run(*arguments: str) -> str:
    """Output of a `spark25-mlx` command."""
    done = subprocess.run(
        [sys.executable, "-m", "spark25_mlx.cli", *arguments], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_checkpoint_generates(bits: int, tmp_path: Path) -> None:
    quantised = tmp_path / "quantised"
    run("convert", "--hf-path", str(TINY), "--mlx-path", str(quantised), "-q", "--q-bits", str(bits))
    spark25_mlx.enable()
    try:
        model, _ = load_model(quantised)
    finally:
        spark25_mlx.disable()
    assert isinstance(model, Model)
    attention = model.layers[0].self_attn
    assert attention.q_k_v_proj.bits == bits
    assert not hasattr(attention.g_proj, "bits")
    text = run("generate", "--model", str(quantised), "--prompt", "Explain the for statement", "-m", "30")
    assert re.search(r"Generation: \d+ tokens", text)
    assert "statement" in text.split("==========")[1]


def test_lora_lowers_the_loss(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"What colour is number {i}?",
            "completion": f"Number {i} is {'red' if i % 2 else 'blue'}.",
        }
        for i in range(64)
    ]
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    adapters = tmp_path / "adapters"
    arguments = {
        "model": TINY,
        "data": tmp_path,
        "iters": 20,
        "batch-size": 4,
        "steps-per-report": 5,
        "val-batches": 1,
        "adapter-path": adapters,
        "num-layers": 8,
        "learning-rate": 1e-3,
    }
    output = run(
        "lora", "--train", *(str(x) for name, value in arguments.items() for x in (f"--{name}", value))
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    losses = [float(loss) for loss in re.findall(r"^\s+\d+\s+(\d+\.\d+)", plain, re.MULTILINE)]
    assert len(losses) == 4, plain
    assert losses[-1] < 0.7 * losses[0]
    assert (adapters / "adapters.safetensors").is_file()
