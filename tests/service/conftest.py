"""What the sidecar's tests share."""

from collections.abc import Iterator

import pytest

from .fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A fake vLLM with a healthy toy model of 8 blocks."""
    with FakeServer() as fake:
        yield fake
