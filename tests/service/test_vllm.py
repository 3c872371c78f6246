"""The client of vLLM's own API, over real HTTP against the fake server."""

import pytest

from flipwatch.service.vllm import Vllm, VllmAway

from .fake_server import MODEL, FakeServer


async def test_health_model_tokens_and_counts_are_read(server: FakeServer) -> None:
    """Each of the four things that the sidecar wants from vLLM arrives."""
    server.serve(3)
    async with Vllm(server.url) as vllm:
        assert await vllm.healthy()
        assert await vllm.model() == MODEL
        assert len(await vllm.tokenize(MODEL, "abc")) == 4
        assert await vllm.served_requests() == 3
        server.serve(2)
        assert await vllm.served_requests() == 5


async def test_an_absent_vllm_is_away(server: FakeServer) -> None:
    """A refused connection is `VllmAway`, and not healthy."""
    server.stop()
    async with Vllm(server.url) as vllm:
        assert not await vllm.healthy()
        with pytest.raises(VllmAway, match="cannot be reached"):
            await vllm.served_requests()
