"""Scans and swaps beside requests, on a live vLLM."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from ..vllm_server import VllmServer
from .reference import Reference, largest_difference

pytestmark = pytest.mark.vllm

STREAMS = 32
TOKENS = 40


def test_scan_changes_no_served_token(healthy: VllmServer, prompts: list[str]) -> None:
    """Requests served while a scan runs equal those without one, bit for bit, prefix cache included."""
    tokens = [healthy.tokens(prompt) for prompt in prompts[:3]]
    healthy.complete(prompts[3])  # fills the prefix cache
    expected = healthy.outputs(prompts)
    cached = _cached_tokens(healthy, prompts[3])
    assert cached > 0
    before = healthy.facts()
    stop, failed = threading.Event(), threading.Event()
    scans: list[dict[str, Any]] = []

    def scan() -> None:
        try:
            while not stop.is_set():
                scans.append(healthy.measure(tokens, [0.0, 0.7, 1.3], steps=2))
        except BaseException:
            failed.set()
            raise

    thread = threading.Thread(target=scan)
    thread.start()
    try:
        while not scans:
            assert not failed.is_set(), "the scan failed"
            assert healthy.outputs(prompts) == expected
    finally:
        stop.set()
        thread.join()
    assert healthy.facts() == before
    assert _cached_tokens(healthy, prompts[3]) == cached
    assert all(scan == scans[0] for scan in scans)


def _cached_tokens(server: VllmServer, prompt: str) -> int:
    body = {"model": "smol", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    usage = server.client.post("/v1/completions", json=body).json()["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def _stream(client: httpx.AsyncClient, prompt: str, begun: asyncio.Event) -> tuple[str, str]:
    """One streamed completion: its text and how it ended."""
    body = {
        "model": "smol",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, ended = "", ""
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choice: dict[str, Any] = json.loads(line.removeprefix("data: "))["choices"][0]
            text += choice["text"]
            ended = choice["finish_reason"] or ended
            if len(text) > 20:
                begun.set()
    return text, ended


async def test_streams_survive_a_skip(healthy: VllmServer, prompts: list[str], reference: Reference) -> None:
    """32 streams in flight while a bad block is skipped: none fails or hangs; later requests see nothing stale."""
    shared = prompts[3]
    healthy.set_gates({12: 0.0})
    expected = healthy.outputs([shared])
    healthy.set_gates({12: 1.0})
    healthy.inject(block=12, tensor="mlp.up_proj", kind="burst", count=50)
    bad = healthy.outputs([shared])  # and its keys and values are in the prefix cache now
    assert bad != expected
    begun = asyncio.Event()
    async with httpx.AsyncClient(base_url=healthy.url, timeout=240, limits=httpx.Limits(max_connections=64)) as client:
        streams = [asyncio.create_task(_stream(client, f"{shared}Story {i}:", begun)) for i in range(STREAMS)]
        await asyncio.wait_for(begun.wait(), 240)
        assert not any(stream.done() for stream in streams)
        report = await asyncio.to_thread(healthy.set_gates, {12: 0.0})
        ends = await asyncio.wait_for(asyncio.gather(*streams), 240)
    assert [ended for _, ended in ends] == ["length"] * STREAMS
    assert report["paused_seconds"] < 30
    print(f"swap under {STREAMS} streams: scheduler stood still for {report['paused_seconds']:.3f} s")
    assert healthy.outputs([shared]) == expected
    tokens = healthy.tokens(shared)
    assert largest_difference(healthy.prompt_logprobs(tokens), reference.logprobs(tokens, 12, 0.0)) < 1e-3


async def test_second_change_is_refused_while_one_runs(healthy: VllmServer) -> None:
    """Two changes at once: one is carried out, the other is refused with 409; a caller that leaves stops nothing."""
    boot_id = healthy.facts()["boot_id"]
    headers = dict(healthy.probe.headers)
    async with httpx.AsyncClient(base_url=str(healthy.probe.base_url), headers=headers, timeout=60) as client:
        bodies = [{"boot_id": boot_id, "gates": [{"block": block, "alpha": 0.0}]} for block in (3, 4)]
        replies = await asyncio.gather(*(client.put("/gates", json=body) for body in bodies))
        assert sorted(reply.status_code for reply in replies) == [200, 409]
        gone = {"boot_id": boot_id, "gates": [{"block": 9, "alpha": 0.0}]}
        await _ask_and_leave(client.build_request("PUT", "/gates", json=gone))
    deadline = asyncio.get_running_loop().time() + 30
    while healthy.facts()["gates"][9] != 0.0:
        assert asyncio.get_running_loop().time() < deadline
    assert healthy.complete("Hello", 4)["finish_reason"] == "length"


async def _ask_and_leave(request: httpx.Request) -> None:
    """Send a whole request and hang up before its answer, however fast that comes."""
    _, writer = await asyncio.open_connection(request.url.host, request.url.port)
    headers = [f"{name}: {value}" for name, value in request.headers.items()]
    lines = [f"PUT {request.url.raw_path.decode()} HTTP/1.1", *headers]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + request.read())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
