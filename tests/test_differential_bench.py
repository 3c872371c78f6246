"""The differential benchmark runs on a small model in a real vLLM, and what it writes holds together."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .vllm_server import WITH_THE_TESTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BENCH = Path(__file__).resolve().parents[1] / "bench"
BLOCKS = 4


@pytest.fixture(scope="module")
def written(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The figures and the page of a `--small` run on a tiny Llama with the real tokenizer."""
    folder = tmp_path_factory.mktemp("differential")
    tokenizer = AutoTokenizer.from_pretrained(smol)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            # Of equal values some faults would change nothing.
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    model.bfloat16().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    command = [*WITH_THE_TESTS, sys.executable, str(BENCH / "differential.py"), "--small"]
    command += ["--model", str(folder / "model"), "--work", str(folder / "work"), "--docs", str(folder / "docs")]
    environment = os.environ | {"PYTHONWARNINGS": "default"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads((folder / "docs" / "results.json").read_text(encoding="utf-8"))
    return figures, (folder / "docs" / "README.md").read_text(encoding="utf-8")


def test_each_fault_was_drawn_judged_and_put_back(written: tuple[dict[str, Any], str]) -> None:
    """A fault of each kind is counted once by each reference, and memory is as before."""
    faults = written[0]["faults"]
    assert faults["faults"] == 12
    assert faults["kinds"] == dict.fromkeys(sorted(faults["kinds"]), 1)
    assert len(faults["kinds"]) == 12
    assert faults["put_back"] == [12, 12]
    for name, reference in faults["references"].items():
        counted = reference["more_than_noise"]["exact"][1] + reference["within_noise"][1] + reference["unchanged"][1]
        assert counted == 12, name
        by_kind = [levels["exact"] for levels in reference["by_kind"].values()]
        assert [sum(column) for column in zip(*by_kind, strict=True)] == reference["more_than_noise"]["exact"]


def test_the_references_locate_what_changes_a_block(written: tuple[dict[str, Any], str]) -> None:
    """Every fault that shows at its block is located in this block and no other, down to the element or the module."""
    for name in ("recorded", "checkpoint"):
        reference = written[0]["faults"]["references"][name]
        for level, (right, of) in reference["more_than_noise"].items():
            assert right == of > 0, (level, reference["misses"])
        assert written[0]["triples"]["references"][name]["exact"] == [2, 2]
    assert written[0]["faults"]["references"]["checkpoint"]["comparisons"]["most"] <= BLOCKS + 4 + 1
    assert written[0]["triples"]["put_back"] == [2, 2]


def test_healthy_models_raise_no_alarm(written: tuple[dict[str, Any], str]) -> None:
    """All noise sources are there once, none is flagged, and equal kernels give equal bits."""
    healthy = written[0]["healthy"]
    assert healthy["judgements"] == len(healthy["pairs"]) == 11
    assert healthy["not_ok"] == 0, [pair["not_ok"] for pair in healthy["pairs"].values()]
    assert healthy["threads"] == {"vLLM bf16": 1, "vLLM bf16, 2 threads": 2, "vLLM fp32": 1}
    assert healthy["pairs"]["vLLM bf16 -> vLLM bf16"]["l2"] == {"block": 0.0, "module": 0.0, "walk": 0.0}
    assert not healthy["pairs"]["vLLM fp32 -> vLLM bf16"]["same_numerics"]


def test_costs_are_measured(written: tuple[dict[str, Any], str]) -> None:
    """The peak holds the clean block at least; each time is there for each repeat; a recording has its bytes."""
    figures = written[0]
    memory, times = figures["memory"], figures["times"]
    assert memory["block_bytes"] <= memory["clean_peak_bytes"] <= memory["checkpoint_peak_bytes"]["without noise"]
    assert memory["resident"]["checkpoint"] >= 0
    assert memory["resident"]["live"] >= 0
    assert {name: len(seconds) for name, seconds in times["seconds"].items()} == dict.fromkeys(times["seconds"], 2)
    assert set(times["over_pass"]) == {"record", "replay", "checkpoint", "one pass over the prefix"}
    assert times["recording_bytes"] > times["inputs_bytes"] > 0


def test_a_rounded_block_ranks_first(written: tuple[dict[str, Any], str]) -> None:
    """Against the same precision only the block that was rounded is flagged; the page says all of it."""
    figures, page = written
    rounded = [one for one in figures["compare"]["rounded"] if one["reference"] == "bfloat16"]
    assert [one["block"] for one in rounded] == [0, BLOCKS - 1]
    assert all(one["rank"] == 1 and one["flagged"] == [one["block"]] for one in rounded)
    assert all(pair["health"] == "ok" for pair in figures["compare"]["healthy"].values())
    assert page.count("\n## ") == 11
    assert f"12 faults of 12 kinds in 9 tensors of {BLOCKS} of {BLOCKS} blocks" in page
