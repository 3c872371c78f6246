"""The benchmarks run, and write the keys that their README names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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


def _documented() -> tuple[set[str], set[str]]:
    """The keys in the README's tables of a run and of one strategy; a row may name several."""
    section = (BENCH / "README.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert section.startswith("scan_cost.py\n")
    tables = section.split("| key |")[1:]
    rows = [re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for table in tables]
    of_run, of_strategy = ({key for row in of_one for key in re.findall(r"`(\w+)`", row)} for of_one in rows)
    return of_run, of_strategy


def test_scan_cost_writes_the_documented_keys(smol: Path, tmp_path: Path) -> None:
    """A tiny damaged model with the real tokenizer: all ways to scan agree, and cost what is predicted."""
    tokenizer = AutoTokenizer.from_pretrained(smol)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model, figures = tmp_path / "model", tmp_path / "figures.json"
    LlamaForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    small = ("--items", "8", "--tokens", "4", "--repeats", "1", "--damage", "4")
    done = _run("--model", str(model), *small, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    written = json.loads(figures.read_text(encoding="utf-8"))
    of_run, of_strategy = _documented()
    assert set(written) == of_run
    assert (written["blocks"], written["sequences"], written["damaged_block"]) == (5, 8, 4)
    assert written["naive_passes"] == 1 + 9 * 5
    assert set(written["strategies"]) == {"quick", "full", "two-stage", "grouped", "growing", "slopes"}
    for name, of_one in written["strategies"].items():
        assert set(of_one) == of_strategy
        assert of_one["passes"] == pytest.approx(of_one["predicted_passes"]), name
        assert of_one["passes"] < written["naive_passes"]
        assert of_one["largest_loss_difference_nats"] < 1e-3, name
        assert of_one["flagged"] == written["naive_flagged"], name


def test_scan_cost_without_a_model_is_one_line_and_code_2(tmp_path: Path) -> None:
    """The line names the folder and what to do."""
    done = _run("--model", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path / "nothing") in done.stderr
    assert "make setup" in done.stderr
