"""What all tests share: the model that `make setup` made."""

import signal
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def smol() -> Path:
    """SmolLM2-135M-Instruct as a plain bf16 checkpoint; a missing one is an error, not a skip."""
    folder = (_ROOT / ".venv" / "model").resolve()
    assert (folder / "config.json").exists(), f"There is no model in {folder}; run `make setup`."
    return folder


def pytest_configure() -> None:
    """A test run that is told to end takes its servers with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
