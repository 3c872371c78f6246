"""The heartbeat in the sidecar: fed by the counters, told of questions that stay open, with and without the probe."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flipwatch.monitors.canary.pulse import Pulse

from .fake_server import FakeServer

Start = Callable[..., Any]


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
async def api(start: Start) -> Any:
    """A sidecar whose heart has a clock of the test's own; 10 s without a move are a hang."""
    made = await start(canary={"hung_seconds": 10}, vllm={"poll_seconds": 5})
    # Its own looks would come in between.
    made.sidecar.schedule.stop()
    await made.sidecar.watcher.look()
    made.sidecar.heart._clock = Clock()
    made.sidecar.heart._looks = {}
    made.sidecar.heart._felt_at = None
    return made


async def _after(api: Any, seconds: float) -> Pulse:
    api.sidecar.heart._clock.at += seconds
    return (await api.sidecar.heart.feel()).pulse


async def test_requests_that_do_not_move_are_a_hang(api: Any, server: FakeServer) -> None:
    """In states, metrics and the verdict; the first token ends it."""
    assert await _after(api, 1) is Pulse.IDLE
    server.answers.running = 2
    assert await _after(api, 5) is Pulse.MOVING
    assert await _after(api, 10) is Pulse.HUNG
    states = (await api.get("/v1/states")).json()
    assert states["pulse"]["pulse"] == "hung"
    assert states["pulse"]["reason"].startswith("2 requests run and 0 wait, and no counter has moved for 10 s")
    assert (await api.metrics())['flipwatch_pulse{state="hung"}'] == 1
    server.answers.tokens += 1
    assert await _after(api, 5) is Pulse.MOVING


async def test_one_engine_that_hangs_is_not_hidden_by_another(api: Any, server: FakeServer) -> None:
    """With data parallelism each replica has counters of its own."""
    server.answers.running, server.answers.busy = 1, True
    server.answers.stuck = 1
    assert await _after(api, 1) is Pulse.UNKNOWN
    assert await _after(api, 5) is Pulse.MOVING
    assert await _after(api, 5) is Pulse.HUNG
    assert api.sidecar.live.beat.reason.startswith("Engine 1: 1 requests run and 0 wait")
    server.answers.stuck = 0
    assert await _after(api, 5) is Pulse.MOVING


async def test_an_idle_engine_that_hangs_owes_an_answer_to_a_question_of_its_own(api: Any, server: FakeServer) -> None:
    """vLLM counts none of its requests, and the other engine computes: only the question that names it tells."""
    heart = api.sidecar.heart
    server.answers.running, server.answers.busy = 1, True
    server.answers.stuck = 0
    await _after(api, 1)
    # All of them owe this one, which says nothing about any.
    with heart.asking():
        for _ in range(3):
            assert await _after(api, 5) is Pulse.MOVING
        heart.heard("0")
        with heart.asking("1"):
            assert await _after(api, 5) is Pulse.MOVING
        assert await _after(api, 10) is Pulse.HUNG
        assert api.sidecar.live.beat.reason.startswith("Engine 1: 0 requests run and 0 wait, the engine has owed")
        heart.heard("0")
        assert await _after(api, 1) is Pulse.HUNG
    heart.heard("1")
    assert await _after(api, 1) is Pulse.MOVING
    with heart.asking("1"):
        assert await _after(api, 5) is Pulse.MOVING
    heart.heard()
    assert await _after(api, 10) is Pulse.MOVING


async def test_a_replica_that_hangs_is_named_while_the_probe_waits_for_it(start: Start, server: FakeServer) -> None:
    """The probe asks all of them, and is silent with it: the canary names them all the same, run after run."""
    server.engines = [0, 1]
    server.answers.stuck = 0
    api = await start(canary={"hung_seconds": 10, "timeout_seconds": 0.3}, vllm={"poll_seconds": 5})
    api.sidecar.schedule.stop()
    api.sidecar.probe._http.timeout = 0.5
    heart = api.sidecar.heart
    heart._clock = Clock()
    heart._looks, heart._felt_at = {}, None
    server.answers.running, server.answers.busy, server.answers.bad_engine = 1, True, 1
    server.facts_free.clear()
    server.answers.hang()
    try:
        for _ in range(2):
            await api.post("/v1/scans", {"monitor": "canary"})
            await api.sidecar.runner.ended("canary")
            for _ in range(4):
                pulse = await _after(api, 5)
            assert pulse is Pulse.HUNG
            assert api.sidecar.live.beat.reason.startswith("Engine 1: 0 requests run and 0 wait, the engine has owed")
    finally:
        server.answers.go_on()
        server.facts_free.set()


async def test_a_probe_that_does_not_answer_is_work_and_stops_no_heart(api: Any, server: FakeServer) -> None:
    """An idle engine that hangs shows by the open question alone; an answer of any kind closes it."""
    assert await _after(api, 1) is Pulse.IDLE
    server.facts_asked.clear()
    server.facts_free.clear()
    looking = asyncio.create_task(api.sidecar.watcher.glance())
    await asyncio.to_thread(server.facts_asked.wait, 30)
    assert await _after(api, 5) is Pulse.MOVING
    # That comes from the API server, whose engine may hang.
    await api.sidecar.probe.checkpoint()
    assert await _after(api, 10) is Pulse.HUNG
    server.facts_free.set()
    await looking
    assert await _after(api, 1) is Pulse.IDLE


async def test_a_late_answer_of_the_probe_leaves_the_question_open(api: Any, server: FakeServer) -> None:
    """The client gives up, the engine still owes the answer."""
    api.sidecar.probe._http.timeout = 0.2
    server.facts_free.clear()
    await api.sidecar.watcher.glance()
    assert not api.sidecar.live.up
    assert await _after(api, 5) is Pulse.UNKNOWN
    assert await _after(api, 10) is Pulse.HUNG
    server.facts_free.set()


@pytest.mark.parametrize("title", ["Asleep", "Not ready"])
async def test_a_server_that_sleeps_does_not_hang(api: Any, server: FakeServer, title: str) -> None:
    """Its probe says so; requests that wait for its end are no sign of a hang."""
    server.answers.running = 1
    await _after(api, 1)
    server.refuse_title = title
    server.refuse["GET /model"] = (503, "vLLM is asleep, or paused by somebody else; nothing is read or changed.")
    await api.sidecar.watcher.glance()
    for _ in range(3):
        pulse = await _after(api, 20)
    assert pulse is (Pulse.UNKNOWN if title == "Asleep" else Pulse.HUNG)


async def test_a_time_in_which_nobody_looked_is_no_hang(api: Any, server: FakeServer) -> None:
    """Sidecar and vLLM were frozen together and go on: what stands still is counted from the first look after that."""
    server.answers.running = 2
    for _ in range(2):
        server.answers.tokens += 1
        assert await _after(api, 5) is not Pulse.HUNG
    assert await _after(api, 300) is Pulse.UNKNOWN
    server.answers.tokens += 1
    assert await _after(api, 5) is Pulse.MOVING
    assert await _after(api, 300) is Pulse.UNKNOWN
    assert await _after(api, 5) is Pulse.UNKNOWN
    assert await _after(api, 5) is Pulse.HUNG


async def test_counters_that_cannot_be_read_are_unknown(api: Any, server: FakeServer) -> None:
    """With vLLM's own words, or httpx's."""
    server.stop()
    assert await _after(api, 1) is Pulse.UNKNOWN
    assert "cannot be reached" in api.sidecar.live.beat.reason
