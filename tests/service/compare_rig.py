"""What the tests of `flipwatch compare` share: tiny checkpoints, and the program called in this process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flipwatch.service.cli import main

from ..byte_tokenizer import byte_tokenizer

LAYERS = 4


class Done(NamedTuple):
    """What a call of the program came to."""

    code: int
    out: str
    err: str


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> Done:
    """`flipwatch compare` with these arguments."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["flipwatch", "compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    return Done(int(left.value.code or 0), out, err)


def refused(done: Done, words: str) -> None:
    """Code 2 and one sentence on standard error, nothing on standard output."""
    assert (done.code, done.out) == (2, ""), done
    assert done.err.startswith("flipwatch: ")
    assert done.err.count("\n") == 1, done.err
    assert words in done.err


def make(folder: Path, **changes: Any) -> Path:
    """A random bf16 Llama in three shards, the same each time."""
    torch.manual_seed(5)
    settings = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings | changes)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="45KB")
    byte_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def change(folder: Path, edit: Callable[[Any], object]) -> None:
    """Change the decoder layers and write the model back."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    layers = getattr(model, model.base_model_prefix)
    with torch.no_grad():
        edit(layers.h if hasattr(layers, "h") else layers.layers)
    for file in folder.glob("model*"):
        file.unlink()
    model.save_pretrained(folder)


def round_to_int8(layer: torch.nn.Module) -> None:
    """Each matrix to 255 steps of its largest value per row, as a quantised build does."""
    for weight in layer.parameters():
        if weight.dim() == 2:
            step = weight.float().abs().amax(dim=1, keepdim=True) / 127
            weight.copy_((weight.float() / step).round() * step)
