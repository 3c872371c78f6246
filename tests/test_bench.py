"""The benchmarks run, and write the keys that their README names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

BENCH = Path(__file__).resolve().parents[1] / "bench"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / "scan_cost.py"), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def _documented() -> set[str]:
    """The keys of the README's table; a row may name several."""
    rows = re.findall(r"^\| (`[^|]+) \|", (BENCH / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def test_scan_cost_writes_the_documented_keys(smol: Path, tmp_path: Path) -> None:
    """A tiny random model with the real tokenizer: both scans agree, and every key is there."""
    tokenizer = AutoTokenizer.from_pretrained(smol)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    model, figures = tmp_path / "model", tmp_path / "figures.json"
    LlamaForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    small = ("--items", "1", "--tokens", "8", "--repeats", "1")
    done = _run("--model", str(model), *small, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    written = json.loads(figures.read_text(encoding="utf-8"))
    assert set(written) == _documented()
    assert (written["blocks"], written["sequences"], written["repeats"]) == (3, 1, 1)
    assert written["shared_passes"] < written["naive_passes"]
    assert written["largest_loss_difference_nats"] < 1e-4


def test_scan_cost_without_a_model_is_one_line_and_code_2(tmp_path: Path) -> None:
    """The line names the folder and what to do."""
    done = _run("--model", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path / "nothing") in done.stderr
    assert "make setup" in done.stderr
