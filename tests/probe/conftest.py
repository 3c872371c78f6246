"""Real vLLM servers, one per mode; each starts once for a file and is shared by its tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..vllm_server import TEST_PLUGIN, VllmServer, install_test_plugin
from .reference import Reference

# Several lengths; the last is longer than a KV block of the CPU build (128 tokens).
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:",
    "The quick brown fox jumps over the lazy dog. " * 20,
]


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Four prompts."""
    return PROMPTS


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that makes the tests' own vLLM plugin loadable."""
    return install_test_plugin(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session")
def test_environment(plugin_path: Path) -> Callable[..., dict[str, str]]:
    """Environment with the tests' plugin doing the named things; `flipwatch=False` leaves Flipwatch out."""

    def make(*things: str, flipwatch: bool = True, **extra: str) -> dict[str, str]:
        plugins = f"flipwatch,{TEST_PLUGIN}" if flipwatch else TEST_PLUGIN
        wanted = things if flipwatch else (*things, "plain_weights")
        return {
            "PYTHONPATH": str(plugin_path),
            "VLLM_PLUGINS": plugins,
            "FLIPWATCH_TESTS": ",".join(wanted),
            **extra,
        }

    return make


# For one file at a time: kept longer, it would hold its 3 GB beside the servers of all later files.
@pytest.fixture(scope="module")
def eager(smol: Path, test_environment: Callable[..., dict[str, str]]) -> Iterator[VllmServer]:
    """Eager, fp32, with a fused norm that overwrites its inputs as CUDA's does."""
    arguments = ["--enforce-eager", "--dtype", "float32", "--enable-prompt-tokens-details"]
    with VllmServer(smol, arguments, test_environment("inplace_norm")) as server:
        assert server.self_test()["state"] == "passed"
        yield server


@pytest.fixture(scope="session")
def reference(smol: Path) -> Reference:
    """The same model in transformers."""
    return Reference(smol)


@pytest.fixture
def healthy(eager: VllmServer) -> Iterator[VllmServer]:
    """The eager server; whatever a test did to it is undone and checked."""
    yield eager
    facts: dict[str, Any] = eager.facts()
    for fault in facts["faults"]:
        eager.heal(fault["id"])
    assert eager.facts()["faults"] == []
    moved = {block: 1.0 for block, alpha in enumerate(facts["gates"]) if alpha != 1.0}
    if moved:
        assert set(eager.set_gates(moved)["gates"]) == {1.0}
