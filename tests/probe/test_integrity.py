"""The bytes of a live vLLM's weights: covered, swept beside requests, named and put back bit for bit."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ..vllm_server import VllmServer

pytestmark = pytest.mark.vllm

STREAMS = 8


@pytest.fixture
def sealed(healthy: VllmServer) -> Iterator[VllmServer]:
    """The eager server; behind the test its bytes are those of the baseline again."""
    yield healthy
    for _ in range(2):
        if bad := changed(healthy):
            healthy.repair(bad)
    assert changed(healthy) == []


def changed(server: VllmServer) -> list[tuple[int, int]]:
    """Rank and chunk of all that differs from the baseline."""
    return [(rank["rank"]["rank"], bad["chunk"]) for rank in server.sweep() for bad in rank["bad"]]


def test_all_weights_are_covered(eager: VllmServer) -> None:
    """Parameters and buffers, once each, and parity is a 64th of them."""
    facts = eager.integrity()
    (seal,) = facts["ranks"]
    assert facts["boot_id"] == eager.facts()["boot_id"]
    assert (facts["refusal"], seal["not_covered"], seal["suspicions"]) == (None, [], [])
    assert (seal["device"], seal["digest"], seal["parity"]) == ("cpu", "gmac", "memory")
    # SmolLM2's parameters in fp32, the head tied to the embedding; the rotary table, and four scales in each block.
    assert seal["covered_bytes"] == 4 * (134_515_008 + 8192 * 64 + 30 * 4)
    assert seal["chunks"] == -(-seal["covered_bytes"] // 2**20)
    assert seal["parity_bytes"] == -(-seal["chunks"] // 64) * 2**20


def test_sweeps_beside_requests_see_nothing_and_change_nothing(sealed: VllmServer, prompts: list[str]) -> None:
    """Many sweeps while requests are served: no chunk differs, and no token either."""
    expected = sealed.outputs(prompts)
    stop = threading.Event()
    sweeps: list[list[dict[str, Any]]] = []

    def keep_sweeping() -> None:
        while not stop.is_set():
            sweeps.append(sealed.sweep(32))

    thread = threading.Thread(target=keep_sweeping)
    thread.start()
    try:
        while len(sweeps) < 3:
            assert thread.is_alive(), "a sweep failed"
            assert sealed.outputs(prompts) == expected
    finally:
        stop.set()
        thread.join()
    assert all((rank["bad_chunks"], rank["replaced"]) == (0, []) for ranks in sweeps for rank in ranks)


@pytest.mark.parametrize(
    ("fault", "pattern"),
    [
        ({"block": 7, "tensor": "mlp.up_proj", "kind": "bit", "count": 1, "seed": 5}, "single_flip"),
        ({"block": 0, "tensor": "self_attn.k_proj", "kind": "burst", "seed": 1}, "burst"),
        ({"block": 29, "tensor": "input_layernorm", "kind": "nan"}, "nan"),
        ({"tensor": "model.norm", "kind": "zeros", "count": 64}, "zeros"),
        ({"tensor": "lm_head", "kind": "inf", "count": 1}, "inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_fault_is_named_and_put_back(
    sealed: VllmServer, prompts: list[str], fault: dict[str, Any], pattern: str
) -> None:
    """In blocks and outside, also where no scan sees it; greedy output afterwards equals that before, bit for bit."""
    expected = sealed.outputs(prompts[:2])
    sealed.inject(**fault)
    live = sealed.facts()["faults"][0]
    (rank,) = sealed.sweep()
    (bad,) = rank["bad"]
    assert [piece["tensor"] for piece in bad["pieces"]] == [live["tensor"]]
    assert [piece["block"] for piece in bad["pieces"]] == [fault.get("block")]
    (diagnosis,) = bad["diagnoses"]
    assert (diagnosis["pattern"], diagnosis["elements"]) == (pattern, live["count"])
    (chunk,) = sealed.repair([(0, bad["chunk"])])["chunks"]
    assert (chunk["intact"], chunk["method"], chunk["reason"]) == (True, "parity", None)
    assert chunk["diagnoses"] == bad["diagnoses"]
    assert changed(sealed) == []
    assert sealed.outputs(prompts[:2]) == expected
    assert sealed.facts()["faults"] == []


def test_two_chunks_of_a_group_come_from_the_checkpoint(sealed: VllmServer, prompts: list[str]) -> None:
    """Parity says that it cannot; the checkpoint's tensors, through vLLM's own loaders, have the baseline's digests."""
    expected = sealed.outputs(prompts[:2])
    (seal,) = sealed.integrity()["ranks"]
    for block in range(seal["parity_groups"] + 1):
        sealed.inject(block=block, tensor="self_attn.qkv_proj", kind="lost")
    (rank,) = sealed.sweep()
    assert rank["bad_chunks"] > seal["parity_groups"]
    assert any("of the same group" in str(bad["unrepairable"]) for bad in rank["bad"])
    report = sealed.repair(changed(sealed))
    assert all(chunk["intact"] for chunk in report["chunks"])
    assert "checkpoint" in {chunk["method"] for chunk in report["chunks"]}
    assert changed(sealed) == []
    assert sealed.outputs(prompts[:2]) == expected


async def test_streams_survive_a_repair(sealed: VllmServer, prompts: list[str]) -> None:
    """Requests in flight while a chunk is put right: none fails, and what they say from then on is recomputed."""
    expected = await asyncio.to_thread(sealed.outputs, prompts[:1])
    sealed.inject(block=9, tensor="mlp.down_proj", kind="bit", count=1, seed=3)
    bad = await asyncio.to_thread(changed, sealed)
    begun = asyncio.Event()
    async with httpx.AsyncClient(base_url=sealed.url, timeout=240) as client:
        streams = [asyncio.create_task(_stream(client, f"Story {at}:", begun)) for at in range(STREAMS)]
        await asyncio.wait_for(begun.wait(), 240)
        assert not any(stream.done() for stream in streams)
        report = await asyncio.to_thread(sealed.repair, bad)
        ends = await asyncio.wait_for(asyncio.gather(*streams), 240)
    assert ends == ["length"] * STREAMS
    assert all(chunk["intact"] for chunk in report["chunks"])
    assert await asyncio.to_thread(sealed.outputs, prompts[:1]) == expected


async def _stream(client: httpx.AsyncClient, prompt: str, begun: asyncio.Event) -> str:
    """How a streamed completion ends."""
    body = {"model": "smol", "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    ended = ""
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                begun.set()
                ended = json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] or ended
    return ended


def test_a_repaired_chunk_is_left_alone(sealed: VllmServer) -> None:
    """An order that comes twice, or after a drill was undone, writes nothing and says that all is well."""
    (chunk,) = sealed.repair([(0, 3), (0, 3)])["chunks"]
    assert (chunk["intact"], chunk["method"], chunk["diagnoses"]) == (True, None, [])


def test_wrong_orders_change_nothing(sealed: VllmServer) -> None:
    """Another process, a chunk or rank that is not there, an empty order, an unknown file: one sentence each."""
    boot_id = sealed.facts()["boot_id"]
    one = {"rank": 0, "chunk": 0}
    for body, status, words in [
        ({"boot_id": "other", "chunks": [one]}, 409, "restarted"),
        ({"boot_id": boot_id, "chunks": [{"rank": 0, "chunk": 10**6}]}, 404, "no chunk 1000000"),
        ({"boot_id": boot_id, "chunks": [{"rank": 7, "chunk": 0}]}, 404, "rank 7"),
        ({"boot_id": boot_id, "chunks": []}, 422, "at least 1"),
    ]:
        reply = sealed.probe.post("/repairs", json=body)
        assert reply.status_code == status
        assert words in reply.json()["detail"]
    reply = sealed.probe.post("/checkpoint/digests", json={"file": "../config.json"})
    assert (reply.status_code, reply.json()["detail"]) == (404, "The checkpoint has no file '../config.json'.")
    reply = sealed.probe.post("/measurements", json={"monitor": "fingerprint", "plan": {"steps": 0}})
    assert reply.status_code == 422


def test_an_announced_change_is_the_new_baseline(sealed: VllmServer, prompts: list[str]) -> None:
    """Recording again approves what lies in memory, counts what differs, and parity gives the new bytes back."""
    fault = sealed.inject(block=3, tensor="mlp.down_proj", kind="burst", seed=4)
    damaged = changed(sealed)
    assert sealed.reading("fingerprint-record", {"steps": 100})["changed_chunks"] == len(damaged) > 0
    assert changed(sealed) == []
    announced = sealed.outputs(prompts[:1])
    sealed.inject(block=3, tensor="mlp.down_proj", kind="zeros", seed=1)
    assert sealed.repair(changed(sealed))["chunks"][0]["method"] == "parity"
    assert sealed.outputs(prompts[:1]) == announced
    sealed.heal(fault)
    assert changed(sealed) == damaged
    assert sealed.reading("fingerprint-record", {"steps": 1})["changed_chunks"] == len(damaged)


def test_memory_equals_the_checkpoint(sealed: VllmServer) -> None:
    """Every tensor that the file holds, bit for bit; a damaged one is named with its count."""
    (rank,) = sealed.reading("fingerprint-checkpoint", {"steps": 1}, 5)["ranks"]
    assert (rank["equal"], rank["different"]) == (182, [])
    sealed.inject(block=11, tensor="mlp.gate_up_proj", kind="burst", count=5)
    (rank,) = sealed.reading("fingerprint-checkpoint", {"steps": 1}, 5)["ranks"]
    assert rank["different"] == ["5 values of model.layers.11.mlp.gate_up_proj.weight differ."]


def test_the_checkpoints_digest_is_that_of_the_file(sealed: VllmServer) -> None:
    """As `sha256sum` says it."""
    import hashlib

    facts = sealed.probe.get("/checkpoint").json()
    (file,) = facts["files"]
    digest = sealed.probe.post("/checkpoint/digests", json={"file": file["name"]}).json()
    with open(f"{facts['folder']}/{file['name']}", "rb") as weights:
        assert digest["sha256"] == hashlib.file_digest(weights, "sha256").hexdigest()
    assert digest["how"] in ("direct", "advised")
