"""What the sidecar's tests share."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from flipwatch.service.app import create_app
from flipwatch.service.settings import Settings
from flipwatch.service.sidecar import Sidecar

from .fake_server import PROBE_TOKEN, FakeServer

TOKENS = [
    {"name": "reader", "token": "token-of-the-reader", "scopes": ["read"]},
    {"name": "operator", "token": "token-of-the-operator", "scopes": ["mitigate"]},
    {"name": "boss", "token": "token-of-the-boss", "scopes": ["admin"]},
]


class Api:
    """The app of one sidecar in this event loop, and a client for it with the operator's token."""

    def __init__(self, sidecar: Sidecar, client: httpx.AsyncClient) -> None:
        self.sidecar = sidecar
        self.client = client

    async def get(self, path: str, who: str | None = "operator") -> httpx.Response:
        """GET as the owner of a token, or without one."""
        return await self.client.get(path, headers=_headers(who))

    async def post(self, path: str, body: object, who: str | None = "operator") -> httpx.Response:
        """POST JSON."""
        return await self.client.post(path, json=body, headers=_headers(who))

    async def delete(self, path: str, who: str | None = "operator") -> httpx.Response:
        """DELETE."""
        return await self.client.delete(path, headers=_headers(who))

    async def scanned(self) -> dict[str, Any]:
        """Scan once by request; the scan with its finding, as the API shows it."""
        accepted = await self.post("/v1/scans", {})
        assert accepted.status_code == 202, accepted.text
        await self.sidecar.runner.idle()
        record: dict[str, Any] = (await self.get(accepted.headers["location"])).json()
        return record

    async def metrics(self) -> dict[str, float]:
        """One scrape, `name{labels}` -> value."""
        text = (await self.client.get("/metrics")).text
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if not line.startswith("#")
        }


def _headers(who: str | None) -> dict[str, str]:
    return {} if who is None else {"authorization": f"Bearer token-of-the-{who}"}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A fake vLLM with a healthy toy model of 8 blocks."""
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def settings(server: FakeServer, tmp_path: Path) -> Callable[..., Settings]:
    """Settings for the fake server; sections can be given by name.  Nothing is scheduled."""

    def make(**sections: Any) -> Settings:
        values: dict[str, Any] = {
            "data_dir": tmp_path / "data",
            "probe_token": PROBE_TOKEN,
            "tokens": TOKENS,
            "vllm": {"url": server.url, "poll_seconds": 3600},
            "scan": {"every_minutes": None, "duty": 1.0},
            "fingerprint": {"every_minutes": None},
            "canary": {"every_minutes": None},
            "validation": {"max_items": 8},
            "mitigation": {"mode": "enforce"},
        }
        for name, value in sections.items():
            values[name] = {**values[name], **value} if isinstance(values.get(name), dict) else value
        return Settings(**values)

    return make


@pytest.fixture
async def start(settings: Callable[..., Settings]) -> AsyncIterator[Callable[..., Any]]:
    """Starts a sidecar: `api = await start(mitigation={"mode": "observe"})`."""
    async with AsyncExitStack() as stack:

        async def make(**sections: Any) -> Api:
            app = create_app(settings(**sections))
            await stack.enter_async_context(app.router.lifespan_context(app))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://sidecar")
            await stack.enter_async_context(client)
            api = Api(app.state.sidecar, client)
            await api.sidecar.schedule.look()
            return api

        yield make
