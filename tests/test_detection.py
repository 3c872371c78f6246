"""The detection benchmark runs, goes on where it was ended, and writes its report; on a tiny random model."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .byte_tokenizer import byte_tokenizer

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def detection() -> Iterator[ModuleType]:
    """The script as a module, cut down to one fault of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        module = importlib.import_module("detection")
        changes: dict[str, Any] = {"healthy_texts": 16, "seeds": 1, "several": 1, "naive": 1, "quota": (1, 1, 1)}
        patch.setitem(module.SIZES, "small", module.SIZES["small"].model_copy(update=changes))
        yield module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four blocks, random weights, a token for each byte."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_measures_resumes_and_reports(detection: ModuleType, model: Path, tmp_path: Path) -> None:
    """Each sort of case is measured once, a second run adds a header only, and the report has every chapter."""
    work, docs = tmp_path / "work", tmp_path / "docs"
    detection.measure(model=model, work=work, dtype="float32", small=True, validation=None, data=None)
    (file,) = work.glob("*.jsonl")
    first = file.read_text().splitlines()
    names = [json.loads(line)["name"] for line in first]
    assert {name.split("/")[0] for name in names} >= {"header", "healthy", "single", "not-finite", "several", "outside"}
    assert len(names) == len(set(names))
    detection.measure(model=model, work=work, dtype="float32", small=True, validation=None, data=None)
    again = file.read_text().splitlines()
    assert [json.loads(line)["name"] for line in again[len(first) :]] == ["header"]

    detection.report(work=work, docs=docs)
    text = (docs / "README.md").read_text()
    for chapter in ("Healthy: ", "Faults in one block", "By kind of fault", "By position", "NaN, Inf", "Outside"):
        assert chapter in text
    (figures,) = json.loads((docs / "results.json").read_text()).values()
    located = figures["not_finite"]["NaN"]
    assert located["cases"] == located["exactly"] == 4
    assert (docs / f"{file.stem}-gains.png").stat().st_size > 1000
    assert not any(parameter.isnan().any() for parameter in LlamaForCausalLM.from_pretrained(model).parameters())
