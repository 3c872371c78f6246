"""A drain: the server is called not ready, nothing in it is touched, and only an undo or a new process ends it."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from flipwatch.service.guard import AlreadyMitigated, BreakerOpen, ModeForbids, WrongState
from flipwatch.service.records import MitigationAction, MitigationState

from .fake_server import FakeServer
from .mitigation_rig import Rig

Start = Callable[..., Any]
DRAIN = {"action": "drain", "reason": "KV cache is broken"}


def _ready(response: httpx.Response) -> tuple[int, str]:
    """Status and, where it is a problem, its sentence."""
    body = response.json()
    if response.status_code != 200:
        assert response.headers["content-type"] == "application/problem+json"
        assert body["type"] == "urn:flipwatch:problem:not-ready"
    return response.status_code, body.get("detail", "")


async def test_a_drain_is_readiness_off_until_it_is_undone(start: Start, server: FakeServer) -> None:
    """`/readyz` names the mitigation, to anybody, without its reason; no gate is written; the undo is at once."""
    api = await start()
    assert _ready(await api.get("/readyz", who=None)) == (200, "")
    accepted = await api.post("/v1/mitigations", DRAIN)
    assert (accepted.status_code, accepted.json()["state"]) == (202, "active")
    name = accepted.json()["id"]
    status, detail = _ready(await api.get("/readyz", who=None))
    assert (status, detail) == (
        503,
        f"drain: mitigation {name} drains this server, until it is undone or vLLM restarts.",
    )
    assert (await api.get("/livez")).status_code == 200
    assert (await api.metrics())["flipwatch_drained"] == 1
    record = (await api.get(f"/v1/mitigations/{name}")).json()
    assert (record["action"], record["blocks"], record["alpha"], record["reason"]) == (
        "drain",
        [],
        None,
        DRAIN["reason"],
    )
    assert server.gates == [1.0] * 8
    assert "drain" in (await api.get("/")).text
    undone = await api.delete(f"/v1/mitigations/{name}")
    assert (undone.status_code, undone.json()["state"]) == (202, "reverted")
    assert _ready(await api.get("/readyz")) == (200, "")
    assert (await api.metrics())["flipwatch_drained"] == 0
    events = [event["what"] for event in (await api.get("/v1/events?limit=2")).json()]
    assert events == ["mitigation reverted", "mitigation active"]


async def test_a_server_that_does_not_answer_can_be_drained_and_undrained(start: Start, server: FakeServer) -> None:
    """The one that needs it most is hung: vLLM is not asked."""
    api = await start()
    server.stop()
    await api.sidecar.schedule.look()
    name = (await api.post("/v1/mitigations", DRAIN)).json()["id"]
    assert _ready(await api.get("/readyz"))[0] == 503
    assert (await api.delete(f"/v1/mitigations/{name}")).json()["state"] == "reverted"
    assert _ready(await api.get("/readyz"))[0] == 200


async def test_a_sidecar_that_was_restarted_beside_a_hung_vllm_drains_it(start: Start, server: FakeServer) -> None:
    """The process that the sidecar before it heard of last is drained, scanned or not, until another one answers."""
    first = await start()
    server.restart()
    await first.sidecar.schedule.look()
    await first.sidecar.__aexit__(None, None, None)
    server.stop()
    api = await start()
    assert api.sidecar.live.facts is None
    record = (await api.post("/v1/mitigations", DRAIN)).json()
    assert _ready(await api.get("/readyz"))[0] == 503
    server.start()
    await api.sidecar.schedule.look()
    assert _ready(await api.get("/readyz"))[0] == 503
    server.restart()
    await api.sidecar.schedule.look()
    assert _ready(await api.get("/readyz"))[0] == 200
    assert (await api.get(f"/v1/mitigations/{record['id']}")).json()["state"] == "reverted"


async def test_a_vllm_that_no_sidecar_ever_heard_of_cannot_be_named(start: Start, server: FakeServer) -> None:
    """Nobody could tell when its drain is to end."""
    server.stop()
    api = await start()
    assert (await api.post("/v1/mitigations", DRAIN)).status_code == 503
    assert _ready(await api.get("/readyz"))[0] == 200


async def test_a_new_vllm_process_ends_the_drain(start: Start, server: FakeServer) -> None:
    """The drain was about the old process."""
    api = await start()
    name = (await api.post("/v1/mitigations", DRAIN)).json()["id"]
    await api.sidecar.schedule.look()
    assert _ready(await api.get("/readyz"))[0] == 503
    server.restart()
    await api.sidecar.schedule.look()
    assert _ready(await api.get("/readyz"))[0] == 200
    record = (await api.get(f"/v1/mitigations/{name}")).json()
    assert (record["state"], record["message"]) == (
        "reverted",
        "vLLM was restarted, which ends the drain of the old process.",
    )


@pytest.mark.parametrize("more", [{"blocks": [4]}, {"alpha": 0.5}, {"force": True}, {"blocks": "flagged"}])
async def test_a_drain_takes_nothing(start: Start, more: dict[str, Any]) -> None:
    """It is about the whole server."""
    api = await start()
    refused = await api.post("/v1/mitigations", DRAIN | more)
    assert refused.status_code == 422
    assert "neither blocks nor alpha nor force" in refused.json()["detail"]


async def test_what_forbids_a_drain() -> None:
    """The mode, another drain, and too many actions; never the number of blocks, and never an undo."""
    rig = Rig(mode="observe")
    with pytest.raises(ModeForbids):
        rig.mitigator.drain("boot-1", reason="", actor="alice")
    assert rig.store.mitigations() == []
    rig = Rig(mode="dry-run")
    record = rig.mitigator.drain("boot-1", reason="", actor="alice")
    assert (record.state, rig.store.open_mitigations()) == (MitigationState.DRY_RUN, [])
    rig = Rig(max_blocks=1, max_actions=2)
    await rig.apply(4)
    record = rig.mitigator.drain("boot-1", reason="", actor="alice")
    assert record.state is MitigationState.ACTIVE
    assert rig.mitigator.done == {MitigationAction.SKIP: 1, MitigationAction.DRAIN: 1}
    with pytest.raises(AlreadyMitigated, match=f"Mitigation {record.id} drains this server already"):
        rig.mitigator.drain("boot-1", reason="", actor="alice")
    with pytest.raises(WrongState):
        await rig.mitigator.finish(record.id, actor="bob")
    undone = await rig.mitigator.undo(record.id, actor="bob")
    assert (undone.state, undone.undone_by) == (MitigationState.REVERTED, "bob")
    assert (await rig.mitigator.undo(record.id, actor="bob")).state is MitigationState.REVERTED
    with pytest.raises(BreakerOpen, match="max_actions allows 2"):
        rig.mitigator.drain("boot-1", reason="", actor="alice")


async def test_a_drain_holds_no_block_and_does_not_wait_for_one() -> None:
    """A skip that is on its way keeps nobody from draining, and a drain keeps nobody from skipping or repairing."""
    rig = Rig()
    pending = await rig.mitigator.apply(MitigationAction.SKIP, [4], reason="test", actor="alice")
    drain = rig.mitigator.drain("boot-1", reason="", actor="alice")
    assert (await rig.mitigator.undo(drain.id, actor="bob")).state is MitigationState.REVERTED
    drain = rig.mitigator.drain("boot-1", reason="", actor="alice")
    skip = await rig.ended(pending)
    assert skip.state is MitigationState.ACTIVE
    assert rig.mitigator.recover(await rig.probe.facts()) == []
    rig.probe.weights.damage(7, 4)
    assert (await rig.repair()).state is MitigationState.REPAIRED
    assert rig.stored(skip).state is MitigationState.REVERTED
    assert rig.stored(drain).state is MitigationState.ACTIVE
