"""Repair over the API and the command line, against a real server that plays the probe."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from flipwatch.service.app import create_app
from flipwatch.service.settings import Settings

from .fake_server import FakeServer

Start = Callable[..., Any]

REPAIR = {"action": "repair"}
TENSOR = "model.layers.4.mlp.up_proj.weight"


async def _settled(api: Any, accepted: Any) -> dict[str, Any]:
    """The record of an accepted mitigation, once it and the scans after it have ended."""
    assert accepted.status_code == 202, accepted.text
    await api.sidecar.mitigator.settled()
    await asyncio.gather(*api.sidecar._followers)
    record: dict[str, Any] = (await api.get(accepted.headers["location"])).json()
    return record


async def _refused(api: Any, body: object, status: int, who: str = "operator") -> str:
    """The detail of the problem that answers this order."""
    response = await api.post("/v1/mitigations", body, who=who)
    assert response.status_code == status, response.text
    detail: str = response.json()["detail"]
    return detail


async def test_changed_weights_are_repaired_and_explained(start: Start, server: FakeServer) -> None:
    """One order, and the record, the audit log and the metrics tell which bit was put right, and how."""
    server.harm[4] = 5.0
    server.weights.damage(7, 4)
    api = await start()
    record = await _settled(api, await api.post("/v1/mitigations", REPAIR | {"reason": "drill"}))
    assert (record["state"], record["blocks"], record["alpha"]) == ("repaired", [4], None)
    assert record["loss_before"] > record["loss_after"] + 4
    [chunk] = record["repairs"]
    assert (chunk["rank"], chunk["chunk"], chunk["method"], chunk["intact"]) == (0, 7, "parity", True)
    [diagnosis] = chunk["diagnoses"]
    assert (diagnosis["tensor"], diagnosis["pattern"]) == (TENSOR, "single_flip")
    assert (diagnosis["changes"][0]["element"], diagnosis["changes"][0]["bits"]) == ([12, 345], [14])
    events = (await api.get("/v1/events")).json()
    [event] = [event for event in events if event["what"] == "mitigation repaired"]
    assert event["detail"]["chunks"][0]["method"] == "parity"
    assert event["detail"]["chunks"][0]["diagnoses"][0].startswith(f"1 bit of {TENSOR} changed: element [12, 345]")
    metrics = await api.metrics()
    assert metrics['flipwatch_mitigations_total{action="repair"}'] == 1
    assert metrics['flipwatch_repaired_chunks_total{method="parity"}'] == 1
    assert metrics['flipwatch_repaired_chunks_total{method="checkpoint"}'] == 0
    assert metrics['flipwatch_mitigation_active{block="4",model_name="toy-model"}'] == 0
    assert {scan["trigger"] for scan in (await api.get("/v1/scans")).json()} == {"verification"}
    assert "is a repair" in (await api.delete(f"/v1/mitigations/{record['id']}")).json()["detail"]
    assert "repair 4" in (await api.get("/")).text
    assert await _refused(api, REPAIR, 409) == "Nothing to repair: all 40 chunks are those of the baseline."


@pytest.mark.parametrize(
    "body",
    [
        {"action": "repair", "alpha": 0.5},
        {"action": "repair", "force": True},
        {"action": "repair", "blocks": []},
        {"action": "skip"},
        {"action": "attenuate", "alpha": 0.5},
    ],
)
async def test_a_wrong_order_is_422(start: Start, server: FakeServer, body: object) -> None:
    """A repair takes neither alpha nor force; only a repair can do without blocks."""
    server.weights.damage(7, 4)
    api = await start()
    await _refused(api, body, 422)
    assert server.weights.bad


async def test_who_may_repair_and_when(start: Start, server: FakeServer) -> None:
    """A reader may not, nobody may while the mode is observe, and without vLLM there is nothing to repair."""
    server.weights.damage(7, 4)
    api = await start(mitigation={"mode": "observe"})
    assert "reader" in await _refused(api, REPAIR, 403, who="reader")
    assert "observe" in await _refused(api, REPAIR, 403)
    api = await start(data_dir=api.sidecar.settings.data_dir / "other")
    assert "0 to 7" in await _refused(api, REPAIR | {"blocks": [8]}, 404)
    server.stop()
    await _refused(api, REPAIR, 503)
    assert server.weights.bad


async def test_flagged_blocks_are_those_of_any_monitor(start: Start, server: FakeServer) -> None:
    """`flagged` takes the blocks that the last findings name, and never means all of them."""
    server.weights.damage(7, 4)
    server.weights.damage(9, None)
    api = await start()
    assert "No block is flagged" in await _refused(api, REPAIR | {"blocks": "flagged"}, 409)
    assert (await api.post("/v1/scans", {"monitor": "fingerprint"})).status_code == 202
    await api.sidecar.runner.idle()
    record = await _settled(api, await api.post("/v1/mitigations", REPAIR | {"blocks": "flagged"}))
    assert (record["state"], record["blocks"]) == ("repaired", [4])
    assert server.weights.bad.keys() == {(0, 9)}


async def test_a_repair_ends_the_skip(start: Start, server: FakeServer) -> None:
    """The skipped block runs again once its weights are right."""
    server.harm[4] = 5.0
    server.weights.damage(7, 4)
    api = await start()
    skip = await _settled(api, await api.post("/v1/mitigations", {"action": "skip", "blocks": [4]}))
    record = await _settled(api, await api.post("/v1/mitigations", REPAIR | {"blocks": [4]}))
    assert record["state"] == "repaired"
    assert (await api.get(f"/v1/mitigations/{skip['id']}")).json()["state"] == "reverted"
    assert server.gates == [1.0] * 8
    assert [block["mitigation_id"] for block in (await api.get("/v1/blocks")).json()] == [None] * 8


async def test_a_running_scan_gives_way_to_a_repair(start: Start, server: FakeServer) -> None:
    """The look at the weights does not wait for the end of a scan."""
    server.weights.damage(7, 4)
    api = await start()
    server.hold()
    scan = await api.post("/v1/scans", {})
    await asyncio.to_thread(server.holding.wait, 10)
    repairing = asyncio.create_task(api.post("/v1/mitigations", REPAIR))
    await asyncio.sleep(0)
    server.release()
    record = await _settled(api, await repairing)
    assert record["state"] == "repaired"
    assert "A mitigation took the engine" in (await api.get(scan.headers["location"])).json()["error"]


@pytest.fixture
def sidecar_url(server: FakeServer, settings: Callable[..., Settings]) -> Iterator[str]:
    """A sidecar on a real port that has seen its vLLM."""
    listener = FakeServer._listener(0)
    app = create_app(settings())
    running = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(20)


def test_the_command_tells_what_it_put_right(server: FakeServer, sidecar_url: str) -> None:
    """A line for each chunk with method, tensor, element and bit; exit code 2 when a chunk stays bad."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLIPWATCH_")}
        environment |= {"FLIPWATCH_URL": sidecar_url, "FLIPWATCH_TOKEN": "token-of-the-operator"}
        command = [sys.executable, "-m", "flipwatch.service.cli", "mitigate", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    server.weights.damage(7, 4)
    server.weights.damage(9, None, parity="Parity is lost.")
    done = run("repair", "--reason", "drill")
    assert (done.returncode, done.stderr) == (0, "")
    first, second, last = done.stdout.splitlines()
    assert first.startswith(
        f"parity       chunk 7 of rank 0 ({TENSOR}): 1 bit of {TENSOR} changed: element [12, 345], "
    )
    assert "bit 14, 0.01 became 4" in first
    assert second == "checkpoint   chunk 9 of rank 0 (model.embed_tokens.weight): what changed is not known"
    name, state, _ = last.split(maxsplit=2)
    assert state == "repaired:"
    assert "single bit flip" in run("show", name).stdout
    assert "repair" in run("list").stdout
    done = run("repair", "4")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Nothing to repair" in done.stderr
    server.weights.damage(7, 4, checkpoint="The checkpoint has moved.")
    done = run("repair", "4", "--json")
    assert done.returncode == 2
    assert '"state": "failed"' in done.stdout
    assert "could not be put right: chunk 7 of rank 0" in done.stderr
    done = run("repair", "4", "--flagged")
    assert (done.returncode, done.stderr) == (2, "flipwatch: Name the blocks, or give --flagged; not both.\n")
