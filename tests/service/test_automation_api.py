"""Automation in a whole sidecar: from what monitors find to what the policy does about it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flipwatch.monitors.canary.pulse import Beat, Pulse
from flipwatch.monitors.wire import ModelFacts
from flipwatch.service.probe import Probe, ProbeLate

from .conftest import Api
from .fake_server import FakeServer

Start = Callable[..., Any]
SKIP = {"verdict": "old_fault", "action": "skip", "k": 1, "n": 1}
REPAIR = [
    {"verdict": verdict, "action": "repair", "k": 1, "n": 1} for verdict in ("weight_fault", "latent_weight_fault")
]
DRAIN = {"verdict": "hung", "action": "drain", "k": 1, "n": 1}


async def _swept(api: Api) -> None:
    assert (await api.post("/v1/scans", {"monitor": "fingerprint"})).status_code == 202
    await api.sidecar.runner.idle()


async def _ended(api: Api) -> list[dict[str, Any]]:
    """All mitigations, newest first, once those that were started have ended and were verified."""
    await api.sidecar.mitigator.settled()
    await asyncio.gather(*api.sidecar._followers)
    records: list[dict[str, Any]] = (await api.get("/v1/mitigations")).json()
    return records


async def _decisions(api: Api) -> list[str]:
    events = (await api.get("/v1/events?limit=1000")).json()
    return [event["what"].removeprefix("automation ") for event in reversed(events) if "automation" in event["what"]]


async def test_a_block_is_left_out_once_enough_scans_flag_it(start: Start, server: FakeServer) -> None:
    """The first scan that flags it is not enough, with a sweep that says that no byte has changed; the second is."""
    server.harm[4] = 5.0
    api = await start(automation={"rules": [SKIP]})
    await api.scanned()
    await _swept(api)
    assert (await _ended(api), server.gates[4]) == ([], 1.0)
    await api.scanned()
    [record] = await _ended(api)
    assert (record["automatic"], record["state"], record["rule"]) == (True, "active", "old_fault: skip")
    assert server.gates[4] == 0.0
    told = (await api.get("/v1/states")).json()["automation"]
    assert told in (await api.get("/")).text
    assert [what for what in await _decisions(api) if what in ("waits", "acts")] == ["waits", "acts"]


async def test_findings_about_a_restarted_vllm_do_not_count_for_the_new_one(start: Start, server: FakeServer) -> None:
    """k of n begins anew after a restart: one finding about the new process is not enough to change it."""
    server.harm[4] = 5.0
    api = await start(automation={"rules": [SKIP]})
    await api.scanned()
    server.restart()
    server.harm[4] = 5.0
    await api.sidecar.schedule.look()
    await api.scanned()
    await _swept(api)
    assert (await _ended(api), server.gates[4]) == ([], 1.0)
    assert (await _decisions(api))[-1] == "waits"


async def test_changed_weights_are_repaired_by_themselves(start: Start, server: FakeServer) -> None:
    """Where the policy says so, one sweep that finds a changed chunk is enough."""
    server.weights.damage(7, 4)
    api = await start(automation={"rules": REPAIR})
    await _swept(api)
    [record] = await _ended(api)
    assert (record["state"], record["actor"], record["automatic"]) == ("repaired", "flipwatch", True)
    assert server.weights.bad == {}


async def test_without_a_policy_nothing_is_done(start: Start, server: FakeServer) -> None:
    """In the mode enforce too."""
    server.weights.damage(7, 4)
    server.harm[4] = 5.0
    api = await start()
    for _ in range(3):
        await api.scanned()
        await _swept(api)
    assert (await api.get("/v1/states")).json()["automation"] == "There is no policy: nothing is automatic."
    assert (await _ended(api), await _decisions(api), server.gates) == ([], [], [1.0] * 8)


async def test_a_hung_server_is_drained_at_the_look_that_finds_it(start: Start) -> None:
    """No finding is needed, which a hung engine cannot give."""
    api = await start(automation={"rules": [DRAIN]})
    assert (await api.get("/readyz")).status_code == 200
    api.sidecar.live.beat = Beat(Pulse.HUNG, "A request is there, and no counter has moved for a minute.")
    await api.sidecar.verdicts.looked()
    assert (await api.get("/readyz")).status_code == 503
    [record] = await _ended(api)
    assert (record["action"], record["state"], record["rule"]) == ("drain", "active", "hung: drain")


async def test_a_sidecar_that_was_restarted_beside_a_hung_vllm_drains_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drains the process that the sidecar before it heard of; the undo of a person holds."""
    first = await start(automation={"rules": [DRAIN]})
    await first.sidecar.__aexit__(None, None, None)

    async def late(_: Probe) -> ModelFacts:
        raise ProbeLate("The probe did not answer in time.")

    monkeypatch.setattr(Probe, "facts", late)
    api = await start(automation={"rules": [DRAIN]})
    assert api.sidecar.live.facts is None
    hung = Beat(Pulse.HUNG, "A request is there, and no counter has moved for a minute.")
    api.sidecar.live.beat = hung
    await api.sidecar.verdicts.looked()
    assert (await api.get("/readyz")).status_code == 503
    [record] = await _ended(api)
    assert (record["action"], record["state"], record["rule"]) == ("drain", "active", "hung: drain")
    await api.delete(f"/v1/mitigations/{record['id']}")
    api.sidecar.live.beat = hung
    await api.sidecar.verdicts.found()
    assert (await api.get("/readyz")).status_code == 200
    assert (await _decisions(api))[-1] == "refused"


async def test_a_vllm_that_answers_without_the_probe_is_not_taken_for_the_one_of_before(
    start: Start, server: FakeServer
) -> None:
    """The sidecar before heard of another process, whose drain would never end; nor is anything decided about it."""
    first = await start(automation={"rules": [DRAIN]})
    decisions = await _decisions(first)
    await first.sidecar.__aexit__(None, None, None)
    server.refuse["GET /model"] = (404, "Not Found")
    api = await start(automation={"rules": [DRAIN]})
    api.sidecar.live.beat = Beat(Pulse.HUNG, "A request is there, and no counter has moved for a minute.")
    await api.sidecar.verdicts.looked()
    assert (await api.get("/readyz")).status_code == 200
    assert (await _ended(api), await _decisions(api)) == ([], decisions)


async def test_a_hung_vllm_that_no_sidecar_ever_heard_of_is_left_alone(start: Start, server: FakeServer) -> None:
    """Nobody could tell when its drain is to end."""
    server.stop()
    api = await start(automation={"rules": [DRAIN]})
    await api.sidecar.schedule.look()
    api.sidecar.live.beat = Beat(Pulse.HUNG, "A request is there, and no counter has moved for a minute.")
    await api.sidecar.verdicts.looked()
    assert (await api.get("/readyz")).status_code == 200
    assert (await _ended(api), await _decisions(api)) == ([], [])
