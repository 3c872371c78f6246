"""What all tests share: the model that `make setup` made, and how tests run side by side."""

import os
import signal
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_SIDE_BY_SIDE = "PYTEST_XDIST_WORKER" in os.environ


@pytest.fixture(scope="session")
def smol() -> Path:
    """SmolLM2-135M-Instruct as a plain bf16 checkpoint; a missing one is an error, not a skip."""
    folder = (_ROOT / ".venv" / "model").resolve()
    assert (folder / "config.json").exists(), f"There is no model in {folder}; run `make setup`."
    return folder


def pytest_configure() -> None:
    """A test run that is told to end takes its servers with it; tests side by side leave each other a core."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if _SIDE_BY_SIDE:
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side, tests with a vLLM come first: what is left for the end is short, so neither half waits for long."""
    if _SIDE_BY_SIDE:
        items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
