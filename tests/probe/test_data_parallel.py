"""Two data-parallel engines behind one API server on CPU, a replica of a tiny random Llama in each."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flipwatch.monitors.alpha_scan import AlphaScan, AlphaScanFinding, AlphaScanPlan, AlphaScanReading
from flipwatch.monitors.canary.answers import CanaryReading
from flipwatch.monitors.canary.plan import PROMPTS
from flipwatch.monitors.finding import Health
from flipwatch.monitors.fingerprint.facts import FingerprintReading
from flipwatch.monitors.fingerprint.judgement import judge
from flipwatch.monitors.wire import ModelFacts
from flipwatch.service.asking import Asking
from flipwatch.service.heart import Heart
from flipwatch.service.live import Live
from flipwatch.service.replicas import worst
from flipwatch.service.vllm import Vllm

from ..vllm_server import VllmServer
from .reference import Reference, largest_difference
from .states import against_checkpoint
from .tiny import make

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXT = "The quick brown fox jumps over the lazy dog and runs away from the old grey wolf in the woods."
ENGINES = (0, 1)
# vLLM's own: the engine that a request goes to.
ENGINE = "X-data-parallel-rank"
LENGTH = 950
"""Tokens of a stream, nearly all that the model takes: it is to be under way while gates change."""


@pytest.fixture(scope="module")
def folder(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint."""
    return make("llama", smol, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, engine 1 fails."""
    return tmp_path_factory.mktemp("switch") / "fail"


@pytest.fixture(scope="module")
def replicas(folder: Path, switch: Path, test_environment: Callable[..., dict[str, str]]) -> Iterator[VllmServer]:
    """Data parallel 2, one thread each."""
    arguments = ["--enforce-eager", "--dtype", "float32", "--data-parallel-size", "2"]
    environment = test_environment(
        "failing_rank",
        "stuck_gate",
        "flip_on_rank",
        FLIPWATCH_TESTS_FAIL=str(switch),
        # For vLLM's own /pause.  Flipwatch needs no dev mode.
        VLLM_SERVER_DEV_MODE="1",
    )
    with VllmServer(folder, arguments, environment) as server:
        assert server.self_test()["state"] == "passed"
        yield server


@contextmanager
def sent_to(server: VllmServer, engine: int) -> Iterator[VllmServer]:
    """All requests go to this engine."""
    server.client.headers[ENGINE] = str(engine)
    try:
        yield server
    finally:
        del server.client.headers[ENGINE]


def outputs(server: VllmServer) -> list[Any]:
    """Greedy tokens and logprobs of each engine."""
    found = []
    for engine in ENGINES:
        with sent_to(server, engine):
            found.append(server.outputs([TEXT]))
    return found


def scanned(server: VllmServer, engine: int) -> AlphaScanFinding:
    """The alpha-scan's finding, measured plan after plan as the sidecar does."""
    monitor, readings = AlphaScan(), []
    order = AlphaScanPlan(alphas=[0.0], tokens=[server.tokens(TEXT)], scored_from=[1])
    while (plan := monitor.next_plan(order, readings, None)) is not None:
        reading = server.reading(monitor.name, plan.model_dump(mode="json"), engine=engine)
        readings.append(AlphaScanReading.model_validate(reading))
    return monitor.judge(readings)


def served(server: VllmServer) -> dict[str, float]:
    """Requests that each engine has finished, by vLLM's own count."""
    lines = server.client.get("/metrics").text.splitlines()
    counts = dict.fromkeys(map(str, ENGINES), 0.0)
    for line in lines:
        if line.startswith("vllm:request_success_total{"):
            counts[line.split('engine="')[1].split('"')[0]] += float(line.rsplit(" ", 1)[1])
    return counts


def test_every_engine_answers(replicas: VllmServer) -> None:
    """Facts and baselines are of both engines, told apart; their ids make one."""
    facts, integrity = replicas.facts(), replicas.integrity()
    assert (facts["data_parallel_size"], facts["engines"], facts["refusal"]) == (2, [0, 1], None)
    assert [seal["rank"] for seal in integrity["ranks"]] == [
        {"rank": engine, "data": engine, "pipeline": 0, "tensor": 0} for engine in ENGINES
    ]
    assert facts["boot_id"] == integrity["boot_id"]
    assert len(facts["model_digest"]) == 32


def test_gates_hold_on_every_engine(replicas: VllmServer, folder: Path) -> None:
    """A skipped block is out of both replicas, whichever engine a request lands on; undone, all is as before."""
    reference = Reference(folder)
    tokens = replicas.tokens(TEXT)
    before = outputs(replicas)
    assert before[0] == before[1]
    replicas.set_gates({3: 0.0})
    for engine in ENGINES:
        with sent_to(replicas, engine):
            of_engine = replicas.prompt_logprobs(tokens)
        assert largest_difference(of_engine, reference.logprobs(tokens, 3, 0.0)) < 1e-3
    skipped, counts = outputs(replicas), served(replicas)
    assert skipped[0] == skipped[1] != before[0]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: replicas.complete(TEXT, 8)["text"], range(24)))
    assert set(texts) == {skipped[0][0][0]}
    landed = {engine: count - counts[engine] for engine, count in served(replicas).items()}
    assert sum(landed.values()) == 24
    assert min(landed.values()) >= 4, landed
    replicas.set_gates({3: 1.0})
    assert outputs(replicas) == before


def test_streams_of_both_engines_live_through_a_change(replicas: VllmServer) -> None:
    """Requests in flight on either engine while gates change and change back come to their full length."""

    def stream(number: int) -> int:
        headers = {ENGINE: str(number % 2)}
        body = {"model": "smol", "prompt": TEXT, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
        reply = httpx.post(f"{replicas.url}/v1/completions", json=body, headers=headers, timeout=300)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["completion_tokens"])

    def running() -> set[str]:
        lines = replicas.client.get("/metrics").text.splitlines()
        rows = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        return {row.split('engine="')[1].split('"')[0] for row in rows if float(row.rsplit(" ", 1)[1])}

    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(stream, number) for number in range(6)]
        deadline = time.monotonic() + 60
        while running() != {"0", "1"}:
            assert time.monotonic() < deadline, "the streams are not under way on both engines"
        replicas.set_gates({2: 0.0})
        try:
            assert running() == {"0", "1"}, "the streams ended too early: this shows nothing"
        finally:
            replicas.set_gates({2: 1.0})
        assert [one.result() for one in streams] == [LENGTH] * 6


def test_engines_are_scanned_one_at_a_time(replicas: VllmServer) -> None:
    """Healthy replicas read the same to the last bit; no reading is taken for both, and no engine made up."""
    tokens = [replicas.tokens(TEXT)]
    first, second = (replicas.measure(tokens, [0.0, 0.7], engine=engine) for engine in ENGINES)
    assert first["nats"] == second["nats"]
    plan = {"alphas": [], "tokens": tokens, "scored_from": [1]}
    order = {"monitor": "alpha_scan", "plan": plan}
    reply = replicas.probe.post("/measurements", json=order)
    assert (reply.status_code, reply.json()["detail"]) == (
        422,
        "engine: Name the one that is measured; there are 0, 1.",
    )
    assert replicas.probe.post("/measurements", json={**order, "engine": 2}).status_code == 404


def test_a_fault_in_one_engine_is_found_and_named(replicas: VllmServer) -> None:
    """NaN in replica 1 alone: the other serves as before, three monitors name the engine, repair ends it."""
    before = outputs(replicas)
    replicas.inject(block=3, tensor="mlp.down_proj", kind="nan", count=1, engine=1)
    assert [fault["engine"] for fault in replicas.facts()["faults"]] == [1]
    texts = []
    for engine in ENGINES:
        with sent_to(replicas, engine):
            # JSON has no number for the logprobs.
            texts.append(replicas.complete(TEXT, 8, logprobs=None)["text"])
    assert texts[0] == before[0][0][0] != texts[1]

    findings = {engine: scanned(replicas, engine) for engine in ENGINES}
    of_engine = worst(findings)
    assert (findings[0].flagged, of_engine.flagged, of_engine.health) == ((), (3,), Health.FAILED)
    assert of_engine.reason.startswith("Engine 1: ")
    against = worst({engine: against_checkpoint(replicas, engine) for engine in ENGINES})
    assert ([place.block for place in against.places], against.reason[:9]) == ([3], "Engine 1:")

    sweep = replicas.sweep()
    assert [(rank["rank"]["data"], rank["bad_chunks"]) for rank in sweep] == [(0, 0), (1, 1)]
    finding = judge(FingerprintReading.model_validate({"ranks": sweep}))
    assert (finding.health, finding.blocks) == (Health.FAILED, (3,))
    assert "rank 1 (engine 1), model.layers.3.mlp.down_proj.weight" in finding.reason
    (chunk,) = replicas.repair([(1, sweep[1]["bad"][0]["chunk"])])["chunks"]
    assert (chunk["rank"], chunk["intact"]) == (1, True)
    assert [rank["bad_chunks"] for rank in replicas.sweep()] == [0, 0]
    assert replicas.facts()["faults"] == []
    assert outputs(replicas) == before


async def test_the_canary_asks_each_engine(replicas: VllmServer) -> None:
    """Each gets its own prompts, whatever vLLM's load balancer would do, and its answers tell which one is damaged."""
    live = Live(monitors=())
    facts = ModelFacts.model_validate(replicas.facts())

    async def asked() -> tuple[list[CanaryReading], dict[str, float]]:
        counts = served(replicas)
        async with Vllm(replicas.url) as vllm:
            heart = Heart(live, vllm, 60.0, every_seconds=5.0, resting=lambda: False)
            readings = await Asking(vllm, live, heart, 60.0).one_by_one(facts, lambda *_: None)
        assert list(readings) == list(ENGINES)
        return list(readings.values()), {engine: count - counts[engine] for engine, count in served(replicas).items()}

    def answers(reading: CanaryReading) -> list[tuple[Any, ...]]:
        return [(answer.failure, answer.tokens, answer.logprobs) for answer in reading.anew]

    before, landed = await asked()
    assert landed == dict.fromkeys(map(str, ENGINES), 2 * len(PROMPTS))
    assert answers(before[0]) == answers(before[1])
    assert before[0].anew[0].tokens
    fault = replicas.inject(block=2, tensor="mlp.down_proj", kind="lost", engine=1)
    damaged, _ = await asked()
    replicas.heal(fault)
    assert answers(damaged[0]) == answers(before[0])
    assert answers(damaged[1]) != answers(before[1])
    healed, _ = await asked()
    assert answers(healed[1]) == answers(before[1])


def test_a_flip_that_nobody_announced(replicas: VllmServer, switch: Path) -> None:
    """One bit in replica 1: only its chunk is bad; parity of the same engine gives it back."""
    before = outputs(replicas)
    Path(f"{switch}-flip").touch()
    replicas.facts()
    assert not Path(f"{switch}-flip").exists()
    healthy, flipped = replicas.sweep()
    assert (healthy["bad_chunks"], flipped["bad_chunks"]) == (0, 1)
    (chunk,) = replicas.repair([(1, flipped["bad"][0]["chunk"])])["chunks"]
    assert (chunk["intact"], chunk["method"]) == (True, "parity")
    assert outputs(replicas) == before


def test_faults_in_all_engines_and_in_one(replicas: VllmServer) -> None:
    """Without an engine a fault is in all; both kinds are undone by id; an unknown engine or fault is told."""
    before = outputs(replicas)
    order = {"block": 2, "tensor": "mlp.down_proj", "kind": "lost"}
    everywhere = replicas.inject(**order)
    in_both = outputs(replicas)
    assert in_both[0] == in_both[1] != before[0]
    replicas.heal(everywhere)
    assert outputs(replicas) == before
    in_one = replicas.inject(**order, engine=0)
    damaged = outputs(replicas)
    assert (damaged[0] == in_both[0], damaged[1] == before[1]) == (True, True)
    replicas.heal(in_one)
    assert outputs(replicas) == before
    assert replicas.probe.post("/faults", json={**order, "engine": 7}).status_code == 404
    assert replicas.probe.delete(f"/faults/{in_one}").status_code == 404


def test_gates_are_never_half_applied(replicas: VllmServer, switch: Path) -> None:
    """An engine whose gate does not move is caught by the read-back, and the other engine's gate is put back."""
    before = outputs(replicas)
    Path(f"{switch}-gate").touch()
    try:
        reply = replicas.gates({2: 0.0})
        assert reply.status_code == 502
        assert "Engine 1 rank 1 has block 2 at 1.0" in reply.json()["detail"]
        assert "put back" in reply.json()["detail"]
    finally:
        Path(f"{switch}-gate").unlink()
    assert set(replicas.facts()["gates"]) == {1.0}
    assert outputs(replicas) == before


def test_an_engine_that_fails_is_named(replicas: VllmServer, switch: Path) -> None:
    """An error on engine 1 is the answer for all; a fault is taken back on engine 0; later calls are as before."""
    before, facts = outputs(replicas), replicas.facts()
    switch.touch()
    try:
        reply = replicas.probe.get("/model")
        assert reply.status_code == 502
        assert reply.json()["detail"].startswith("1 of 2 ranks failed. engine 1 rank 1: RuntimeError")
        reply = replicas.probe.post("/faults", json={"block": 2, "tensor": "mlp.down_proj", "kind": "lost"})
        assert reply.status_code == 502
    finally:
        switch.unlink()
    assert replicas.facts() == facts
    assert outputs(replicas) == before


def test_paused_server_is_left_alone(replicas: VllmServer) -> None:
    """While somebody else has paused vLLM, nothing is read, and the pause stays theirs."""
    facts = replicas.facts()
    assert replicas.client.post("/pause", params={"mode": "keep"}).status_code == 200
    try:
        reply = replicas.probe.get("/model")
        assert (reply.status_code, "paused by somebody else" in reply.json()["detail"]) == (503, True)
        assert replicas.client.get("/is_paused").json()["is_paused"]
    finally:
        assert replicas.client.post("/resume").status_code == 200
    assert replicas.facts() == facts


def test_a_killed_engine_leaves_no_server(replicas: VllmServer) -> None:
    """vLLM ends with any of its engines: nobody speaks on for the one that is gone.  Last, as it ends the server."""
    workers = psutil.Process(replicas.pid).children(recursive=True)
    (second,) = [process for process in workers if "EngineCore_DP1" in " ".join(process.cmdline())]
    second.kill()
    with pytest.raises(httpx.TransportError):
        _ask_until(replicas, time.monotonic() + 60)


def _ask_until(server: VllmServer, deadline: float) -> None:
    while time.monotonic() < deadline:
        assert server.probe.get("/model").status_code != 200
