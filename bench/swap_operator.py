"""A vLLM with a sidecar in `enforce`, and the operator who orders swaps while streams are open."""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from streams import Server

from flipwatch.monitors.wire import PREFIX

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deploy" / "demo"))
from pair import SERVED_NAME, Pair, be_stoppable

KV_BLOCK = 32
"""Tokens of one block of the KV cache, the smallest that vLLM's CPU build takes: only whole blocks are cached."""
_ENDS = ("active", "reverted", "repaired", "failed", "interrupted")


class Operator:
    """Somebody with the sidecar's API, and with the probe's token for references."""

    def __init__(self, pair: Pair) -> None:
        self._sidecar, self._probe = (
            httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=600, trust_env=False)
            for url, token in ((pair.sidecar_url + "/v1", pair.token), (pair.vllm_url + PREFIX, pair.probe_token))
        )

    async def close(self) -> None:
        """End the connections."""
        await self._sidecar.aclose()
        await self._probe.aclose()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request to the sidecar and its JSON; raises `RuntimeError` with what it says."""
        reply = await self._sidecar.request(method, path, json=body)
        if not reply.is_success:
            raise RuntimeError(f"{method} {path}: {reply.status_code} {reply.text}")
        return reply.json() if reply.content else None

    async def set_gate(self, block: int, alpha: float) -> None:
        """Set a gate by the probe's own route."""
        boot_id = (await self._probe.get("/model")).json()["boot_id"]
        gates = [{"block": block, "alpha": alpha}]
        (await self._probe.put("/gates", json={"boot_id": boot_id, "gates": gates})).raise_for_status()

    async def ready(self) -> None:
        """Wait until the gates have been tested."""
        await self._until("/states", lambda states: states["mitigation"]["offered"])

    async def ended(self, mitigation: str) -> dict[str, Any]:
        """Wait for the end of a mitigation; the record."""
        return await self._until(f"/mitigations/{mitigation}", lambda record: record["state"] in _ENDS)

    async def swept(self) -> None:
        """Have the weights swept, and wait for the end of it; raises `RuntimeError` where nothing was found."""
        while True:
            await self._until("/states", lambda states: not states["scanning"])
            try:
                scan = await self.call("POST", "/scans", {"monitor": "fingerprint"})
                break
            except RuntimeError:
                # A scan of its own came in between.
                await asyncio.sleep(0.2)
        record = await self._until(f"/scans/{scan['id']}", lambda scan: scan["state"] in ("done", "failed"))
        if record["state"] == "failed" or not record["finding"]["bad_chunks"]:
            raise RuntimeError(f"The sweep found nothing: {record}")

    async def _until(self, path: str, there: Callable[[Any], bool]) -> dict[str, Any]:
        while True:
            seen = await self.call("GET", path)
            if there(seen):
                return dict(seen)
            await asyncio.sleep(0.2)

    async def history(self, mitigation: str) -> dict[str, float]:
        """When the audit log says that it came to each state the last time, in epoch seconds."""
        events = await self.call("GET", "/events?limit=100")
        return {
            event["what"].removeprefix("mitigation "): event["at"]
            for event in reversed(events)
            if event["detail"].get("id") == mitigation
        }


class Order:
    """One request to the sidecar, sent in the middle of a wave."""

    def __init__(self, operator: Operator, method: str, path: str, body: Any = None) -> None:
        self._operator = operator
        self._request = (method, path, body)
        self._answered = self._epoch = 0.0
        self.sent = 0.0
        """When, by `time.perf_counter`."""
        self.id = ""

    async def send(self) -> None:
        """Send it and take in the 202."""
        self.sent, self._epoch = time.perf_counter(), time.time()
        self.id = (await self._operator.call(*self._request))["id"]
        self._answered = time.perf_counter()

    async def ended(self) -> tuple[dict[str, Any], dict[str, float]]:
        """The record at its end, and the seconds from the request to its answer and to each state."""
        record = await self._operator.ended(self.id)
        history = await self._operator.history(self.id)
        steps = {state: at - self._epoch for state, at in history.items() if at >= self._epoch}
        return record, {"answered": self._answered - self.sent, **steps}


@asynccontextmanager
async def served(model: Path, streams: int, dtype: str, items: int) -> AsyncIterator[tuple[Server, Operator]]:
    """Clients of a vLLM that takes so many streams at once, and of its sidecar; raises `StartFailed`."""
    be_stoppable()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "scan": {"every_minutes": None},
            "fingerprint": {"every_minutes": None},
            "canary": {"every_minutes": None},
            "validation": {"max_items": items},
            "mitigation": {"mode": "enforce"},
        }
        with Pair(Path(folder), settings) as pair:
            # Of an option that comes twice the last one counts.
            pair.vllm.command += [
                *("--model", str(model), "--dtype", dtype, "--enforce-eager", "--block-size", str(KV_BLOCK)),
                *("--max-num-seqs", str(max(256, streams)), "--max-num-batched-tokens", "2048"),
                "--enable-prompt-tokens-details",
            ]
            pair.start_vllm()
            pair.start_sidecar()
            server, operator = Server(pair.vllm_url, SERVED_NAME), Operator(pair)
            try:
                await operator.ready()
                yield server, operator
            finally:
                await server.close()
                await operator.close()
