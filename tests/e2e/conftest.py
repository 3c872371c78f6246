"""A vLLM and a receiver of alerts for each file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..vllm_server import VllmServer
from .sidecar import Webhook


@pytest.fixture(scope="module")
def vllm(smol: Path) -> Iterator[VllmServer]:
    """vLLM as an operator starts it: bf16, compiled, prefix cache on."""
    # Ahead-of-time artefacts of this build's default mode cannot be loaded again: half a minute for nothing.
    with VllmServer(smol, environment={"VLLM_USE_AOT_COMPILE": "0"}) as server:
        yield server


@pytest.fixture(scope="module")
def webhook() -> Iterator[Webhook]:
    """Receives alerts."""
    receiver = Webhook()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def checkpoint(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a folder of its own."""
    folder = tmp_path_factory.mktemp("served") / "model"
    folder.mkdir()
    for file in smol.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def with_one_group(checkpoint: Path) -> Iterator[VllmServer]:
    """vLLM as in the other tests, with one group of parity for all chunks."""
    environment = {"VLLM_USE_AOT_COMPILE": "0", "FLIPWATCH_PARITY_GROUP": "100000"}
    with VllmServer(checkpoint, environment=environment) as server:
        yield server
