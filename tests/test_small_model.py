"""The benchmark's own model: training runs, and what it writes can be loaded and scanned."""

import importlib.util
import math
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from flipwatch.monitors.validation import load_items
from flipwatch.probe.local import LocalView

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "small_model.py"
TINY = {"blocks": 3, "width": 32, "heads": 2, "mlp": 48, "vocabulary": 400, "window": 32, "batch": 4}


@pytest.fixture(scope="module")
def small_model() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("small_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["small_model"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(small_model: ModuleType) -> dict[str, str]:
    """Parts of the standard library by name."""
    texts: dict[str, str] = small_model.library_texts(Path(sysconfig.get_path("stdlib")))
    return texts


def make(small_model: ModuleType, texts: dict[str, str], out: Path, **changes: Any) -> dict[str, Any]:
    """A tiny checkpoint of a few parts; returns its figures."""
    few = {name: texts[name] for name in sorted(texts)[:40]}
    figures: dict[str, Any] = small_model.make_checkpoint(
        few, small_model.Recipe(**TINY, **({"steps": 40} | changes)), out, Console(quiet=True)
    )
    return figures


def test_checkpoint_loads_and_learned(small_model: ModuleType, library: dict[str, str], tmp_path: Path) -> None:
    """The local engine takes the checkpoint, the tokenizer is its own, and the loss fell below chance."""
    figures = make(small_model, library, tmp_path)
    view = LocalView.load(tmp_path)
    assert view.num_blocks == len(figures["skip_cost_nats"]) == 3
    assert {name for name, _ in view.layers[0].named_children()} == {
        "self_attn",
        "mlp",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    }
    assert figures["training_nats"] < math.log(TINY["vocabulary"]) - 0.3
    assert figures["held_out_nats"] < math.log(TINY["vocabulary"]) - 0.3

    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "def f(x):\n    return {'ä': x}\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == TINY["vocabulary"]


def test_validation_figures_are_those_of_the_validation_file(
    small_model: ModuleType, library: dict[str, str], tmp_path: Path
) -> None:
    """Loss and cost of leaving a block out, against the model's own forward on each item of the file."""
    figures = make(small_model, library, tmp_path)
    view, tokenizer = LocalView.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    items = load_items(tmp_path / "validation.jsonl")
    assert len(items) == figures["validation_items"] > 0
    layers = [list(view.layers), [view.layers[0], view.layers[2]]]
    means = []
    for kept in layers:
        view.model.model.layers = torch.nn.ModuleList(kept)
        view.model.config.num_hidden_layers = len(kept)
        total, count = 0.0, 0
        for item in items[:128]:
            row = tokenizer(item.prompt)["input_ids"] + tokenizer(item.answer)["input_ids"]
            tokens = torch.tensor([row[:128]])
            with torch.inference_mode():
                nats = float(view.model(input_ids=tokens, labels=tokens, use_cache=False).loss)
            total, count = total + nats * (tokens.shape[1] - 1), count + tokens.shape[1] - 1
        means.append(total / count)
    assert figures["validation_nats"] == pytest.approx(means[0], abs=1e-4)
    assert figures["skip_cost_nats"][1] == pytest.approx(means[1] - means[0], abs=1e-4)


def test_seed_decides_the_weights(small_model: ModuleType, library: dict[str, str], tmp_path: Path) -> None:
    """The same seed gives the same file, another seed another one."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(small_model, library, tmp_path / name, steps=3, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_training_ends_by_the_clock(small_model: ModuleType, library: dict[str, str], tmp_path: Path) -> None:
    """Minutes replace steps."""
    figures = make(small_model, library, tmp_path, steps=None, minutes=0.005)
    assert figures["steps"] > 1
    assert 0.3 <= figures["seconds"] < 30


def test_library_gives_a_validation_set(small_model: ModuleType, library: dict[str, str]) -> None:
    """At least 300 different pieces of many modules, the same at every call, none of them from a part trained on."""
    kept = {name: text for name, text in library.items() if small_model.is_held_out(name)}
    assert 0.03 < sum(map(len, kept.values())) / sum(map(len, library.values())) < 0.10
    items = small_model.validation_items(kept)
    assert len({(item.prompt, item.answer) for item in items}) >= 300
    assert len({item.topic for item in items}) >= 50
    assert all(any(item.prompt + item.answer in text for text in kept.values()) for item in items)
    assert small_model.validation_items(kept) == items


def test_library_without_sources_is_one_line_and_code_2(
    small_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the folder and what to do."""
    monkeypatch.setattr(small_model.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(small_model.typer.Exit) as end:
        small_model.main(out=tmp_path / "out")
    assert end.value.exit_code == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert f"{tmp_path} holds too few sources" in err
    assert not (tmp_path / "out").exists()
