"""Models that Flipwatch does not know, and a Flipwatch that is switched off: vLLM serves as if it were not there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from flipwatch.probe.stack import Signature, UnsupportedModel

from ..vllm_server import VllmServer
from .tiny import make

pytestmark = pytest.mark.vllm

TEXT = "The quick brown fox jumps over the lazy dog and runs away from the old grey wolf in the woods."
ARGUMENTS = ["--enforce-eager", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return make("llama", smol, tmp_path_factory.mktemp("tiny"))


def test_unknown_layer_form_is_refused(folder: Path, test_environment: Callable[..., dict[str, str]]) -> None:
    """A layer that returns an unknown form is refused by name; off switch and refusal serve the same tokens."""
    packed = test_environment("odd_layer", FLIPWATCH_CPU_PLAIN_WEIGHTS="0")
    with VllmServer(folder, ARGUMENTS, packed) as server:
        facts = server.facts()
        assert not facts["armed"]
        assert "LlamaDecoderLayer returns list" in facts["refusal"]
        assert facts["gates"] == []
        reply = server.gates({0: 0.0})
        assert reply.status_code == 501
        assert "LlamaDecoderLayer" in reply.json()["detail"]
        plan = {"alphas": [], "tokens": [[1, 2, 3]], "scored_from": [1]}
        reply = server.probe.post("/measurements", json={"monitor": "alpha_scan", "plan": plan})
        assert reply.status_code == 501
        refused = server.outputs([TEXT])
        _check_coverage(server)
    with VllmServer(folder, ARGUMENTS, test_environment(FLIPWATCH_DISABLE="1")) as server:
        assert server.probe.get("/model").status_code == 404
        assert server.outputs([TEXT]) == refused


def _check_coverage(server: VllmServer) -> None:
    """Bytes are swept where gates are refused; weights that the engine packed are named with their size."""
    (seal,) = server.integrity()["ranks"]
    hidden = {missing["tensor"]: missing["bytes"] for missing in seal["not_covered"]}
    config = json.loads((server.model / "config.json").read_text())
    size = 4 * config["hidden_size"] * config["intermediate_size"]
    for block in range(config["num_hidden_layers"]):
        assert hidden[f"model.layers.{block}.mlp.gate_up_proj.weight"] == 2 * size
        assert hidden[f"model.layers.{block}.mlp.down_proj.weight"] == size
    assert all("empty" in missing["reason"] for missing in seal["not_covered"])
    (rank,) = server.sweep()
    assert (rank["bad_chunks"], rank["not_covered"]) == (0, seal["not_covered"])


def test_layer_without_hidden_states_is_refused() -> None:
    """A layer class whose input has no known name is refused by its class name."""

    class Odd(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels

    with pytest.raises(UnsupportedModel, match="Odd has no argument named hidden_states"):
        Signature.of(Odd())
