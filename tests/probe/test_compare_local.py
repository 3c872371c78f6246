"""`flipwatch compare` of checkpoints of several architectures: what a block hands on, and how, differs between them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils import logging

from flipwatch.service.cli.offline import quieten
from flipwatch.service.compared import Comparison

from ..service.compare_rig import call, change, round_to_int8
from . import tiny


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    quieten()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity_warning()
    logging.enable_progress_bar()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3", "qwen3_moe"])
def test_precision_passes_and_a_rounded_block_is_found(
    family: str,
    smol: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """fp32 against bf16 of the same weights is healthy; one block of the six rounded to int8 is named, and no other."""
    healthy = tiny.make(family, smol, tmp_path / "healthy")
    few = ("--items", 2, "--max-tokens", 16, "--no-gain", "--json")
    done = call(monkeypatch, capsys, healthy, healthy, "--dtype-b", "bfloat16", *few)
    assert done.code == 0, done
    found = Comparison.model_validate_json(done.out)
    assert all(block.l2 for block in found.finding.blocks)

    rounded = Path(shutil.copytree(healthy, tmp_path / "rounded"))
    change(rounded, lambda layers: round_to_int8(layers[3]))
    done = call(monkeypatch, capsys, healthy, rounded, *few)
    assert done.code == 1, done
    found = Comparison.model_validate_json(done.out)
    assert found.ranking[0] == 3
    assert [block.block for block in found.finding.blocks if block.departs] == [3]
