"""The client of vLLM's own API, over real HTTP against the fake server."""

import pytest

from flipwatch.service.connection import without_userinfo
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


async def test_no_failure_repeats_a_secret(server: FakeServer) -> None:
    """Neither a key that h11 refuses in its own words, nor a password in the URL."""
    async with Vllm(server.url, "secret\n") as vllm:
        with pytest.raises(VllmAway, match="LocalProtocolError") as caught:
            await vllm.served_requests()
        assert "secret" not in str(caught.value)
    server.stop()
    async with Vllm(server.url.replace("http://", "http://user:secret@")) as vllm:
        with pytest.raises(VllmAway, match=f"vLLM at {server.url} cannot be reached") as caught:
            await vllm.served_requests()
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:1/a@b", "http://host:1/a@b"),
        ("http://user:p@ss@host:1/a@b", "http://host:1/a@b"),
        ("https://user@host?x=@", "https://host?x=@"),
        ("user:pass@host", "host"),
    ],
)
def test_shown_urls_have_no_user_and_password(url: str, shown: str) -> None:
    """Only what stands before the host is left out."""
    assert without_userinfo(url) == shown
