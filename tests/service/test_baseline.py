"""The clean profile: recorded, used, refused, moved and removed, over the API."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .fake_server import FakeServer

Start = Callable[..., Any]

PATH = "/v1/baselines"


async def _recorded(api: Any) -> dict[str, Any]:
    """Ask for a profile and wait; the scan that it was to be made of."""
    accepted = await api.post(PATH, {}, who="boss")
    assert accepted.status_code == 202, accepted.text
    await api.sidecar.runner.idle()
    scan: dict[str, Any] = (await api.get(accepted.headers["location"])).json()
    return scan


async def _put(api: Any, profile: object, who: str = "boss") -> httpx.Response:
    headers = {"authorization": f"Bearer token-of-the-{who}"}
    answer: httpx.Response = await api.client.put(PATH, json=profile, headers=headers)
    return answer


def _refused(response: httpx.Response, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    assert words in response.json()["detail"]


async def test_a_recorded_profile_is_used_by_the_next_scan(start: Start, server: FakeServer) -> None:
    """Without a profile a finding says so; with it there are scores against it, and the reason and the page say so."""
    api = await start()
    _refused(await api.get(PATH), 404, "record one")
    scan = await _recorded(api)
    assert (scan["trigger"], scan["state"], scan["profile_refusal"]) == ("baseline", "done", None)
    assert scan["finding"]["reason"].endswith("; no clean profile was used")
    profile = (await api.get(PATH)).json()
    assert profile["provenance"]["engine"] == "vllm 0.32.0 eager"
    assert profile["provenance"]["model_digest"] == server.model_digest
    assert (len(profile["blocks"]), profile["base_nats"]) == (8, [2.0, 2.01, 2.02, 2.03, 2.04, 2.05, 2.06, 2.07])
    assert "waits for the next scan" in (await api.get("/v1/states")).json()["profile"]

    finding = (await api.scanned())["finding"]
    assert finding["profile_recorded_at"] == profile["recorded_at"]
    assert (finding["health"], finding["drift_nats"]) == ("ok", 0.0)
    assert "against the clean profile the loss is +0.000 nats" in finding["reason"]
    assert {block["bss_profile_z"] for block in finding["blocks"]} == {0.0}
    assert "The last scan was judged with the clean profile" in (await api.get("/")).text
    metrics = await api.metrics()
    assert metrics["flipwatch_profile_used"] == 1
    name = 'block="3",model_name="toy-model"'
    assert metrics[f'flipwatch_block_zscore{{{name},reference="profile",score="bss"}}'] == 0
    assert metrics['flipwatch_drift_nats{model_name="toy-model"}'] == 0
    events = [(event.actor, event.what) for event in api.sidecar.store.events(2)]
    assert events == [("flipwatch", "profile recorded"), ("boss", "profile asked for")]


async def test_damage_outside_every_block_is_seen_with_a_profile_only(start: Start, server: FakeServer) -> None:
    """A loss above its healthy value is failed by drift and names no block; undone, the model is ok again."""
    api = await start(faults={"enabled": True})
    order = {"tensor": "embed_tokens", "kind": "burst"}
    fault = (await api.post("/v1/faults", order, who="boss")).json()
    assert (await api.scanned())["finding"]["health"] == "ok"
    await api.delete(f"/v1/faults/{fault['id']}", who="boss")
    await _recorded(api)
    fault = (await api.post("/v1/faults", order, who="boss")).json()
    finding = (await api.scanned())["finding"]
    assert (finding["health"], finding["flagged"], finding["action"]) == ("failed", [], "investigate")
    assert finding["drift_nats"] == pytest.approx(1.0)
    await api.delete(f"/v1/faults/{fault['id']}", who="boss")
    assert (await api.scanned())["finding"]["health"] == "ok"


async def test_a_profile_outlives_a_restart_of_the_sidecar(start: Start) -> None:
    """It lies in the store, and is used again."""
    first = await start()
    await _recorded(first)
    profile = (await first.get(PATH)).json()
    await first.sidecar.__aexit__(None, None, None)
    second = await start()
    assert (await second.get(PATH)).json() == profile
    assert (await second.scanned())["finding"]["profile_recorded_at"] == profile["recorded_at"]


async def test_a_profile_of_a_cheaper_scan_covers_all_blocks(start: Start) -> None:
    """Where scans measure most blocks on a few alphas, the profile is still made of every block at every alpha."""
    api = await start(scan={"strategy": "two-stage"})
    assert (await _recorded(api))["profile_refusal"] is None
    profile = (await api.get(PATH)).json()
    assert profile["alphas"] == [0.0, 0.7, 1.3]
    finding = (await api.scanned())["finding"]
    assert {block["bss_profile_z"] for block in finding["blocks"]} == {0.0}


# No profile of a model that may be bad


async def test_no_profile_of_a_flagged_model(start: Start, server: FakeServer) -> None:
    """What a scan flags never becomes what is normal; the finding itself counts as always."""
    server.harm[4] = 5.0
    api = await start(alerts={"k": 1, "n": 1})
    scan = await _recorded(api)
    assert (scan["state"], scan["finding"]["flagged"]) == ("done", [4])
    assert "a model that is failed" in scan["profile_refusal"]
    _refused(await api.get(PATH), 404, "no clean profile")
    assert [alert.block for alert in api.sidecar.alerts.firing] == [4]


async def test_no_profile_of_a_drifted_model(start: Start, server: FakeServer) -> None:
    """Recording again does not make a damaged model the new normal; the old profile stays."""
    api = await start()
    await _recorded(api)
    profile = (await api.get(PATH)).json()
    server.outside = 1.0
    assert "a model that is failed" in (await _recorded(api))["profile_refusal"]
    assert (await api.get(PATH)).json() == profile


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda server: server.gates.__setitem__(3, 0.5), "mitigated (block 3)"),
        (lambda server: setattr(server, "model_digest", None), "no digest of its weights, and vLLM's log"),
        (lambda server: setattr(server, "armed", False), "no digest of its weights (ToyLayer is not supported)."),
    ],
)
async def test_no_profile_where_it_could_not_be_clean(
    start: Start, server: FakeServer, spoil: Callable[[FakeServer], None], words: str
) -> None:
    """Gated blocks and a model that nothing identifies are refused before anything is measured."""
    api = await start()
    spoil(server)
    _refused(await api.post(PATH, {}, who="boss"), 409, words)
    assert server.steps == []


async def test_no_profile_while_a_fault_is_injected(start: Start, server: FakeServer) -> None:
    """Also when the fault comes between the order and the measurement."""
    api = await start(faults={"enabled": True})
    order = {"block": 2, "tensor": "mlp.up_proj", "kind": "zeros"}
    server.hold()
    scan = (await api.post(PATH, {}, who="boss")).headers["location"]
    await asyncio.to_thread(server.holding.wait, 10)
    assert (await api.post("/v1/faults", order, who="boss")).status_code == 201
    server.release()
    await api.sidecar.runner.idle()
    assert (await api.get(scan)).json()["state"] == "failed"
    server.harm[2] = 0.0
    _refused(await api.post(PATH, {}, who="boss"), 409, "1 injected faults")
    _refused(await api.get(PATH), 404, "no clean profile")


async def test_a_grid_without_zero_makes_no_profile(start: Start) -> None:
    """The skip gains would be missing."""
    api = await start(scan={"grid": [0.7, 1.3]})
    assert "a grid that holds 0" in (await _recorded(api))["profile_refusal"]


async def test_only_one_at_a_time_and_only_with_vllm(start: Start, server: FakeServer) -> None:
    """A scan that runs is not replaced; without vLLM there is nothing to record."""
    api = await start()
    server.hold()
    assert (await api.post("/v1/scans", {})).status_code == 202
    _refused(await api.post(PATH, {}, who="boss"), 409, "A scan runs already")
    server.release()
    await api.sidecar.runner.idle()
    server.stop()
    assert (await api.post(PATH, {}, who="boss")).status_code == 503


async def test_a_store_that_takes_no_writes_makes_no_profile(start: Start) -> None:
    """The scan is done, and says why there is no profile; nothing is used that would be gone after a restart."""
    api = await start()
    accepted = await api.post(PATH, {}, who="boss")
    api.sidecar.store._file._db.execute("PRAGMA query_only = 1")
    await api.sidecar.runner.idle()
    record = api.sidecar.runner.record(accepted.json()["id"])
    assert "cannot be used" in record.profile_refusal
    assert api.sidecar.baseline.current is None


# A profile that does not fit


async def test_another_checkpoint_is_judged_without_the_profile(start: Start, server: FakeServer) -> None:
    """Other weights under the same name are no drift: the finding says that and why the profile was not used."""
    api = await start()
    await _recorded(api)
    server.restart()
    server.model_digest, server.outside = "another", 1.0
    finding = (await api.scanned())["finding"]
    assert (finding["health"], finding["drift_nats"], finding["profile_recorded_at"]) == ("ok", None, None)
    told = "the one that is kept does not fit: The profile was recorded under other conditions: model_digest"
    assert told in finding["reason"]
    assert "is not used: The profile was recorded" in (await api.get("/v1/states")).json()["profile"]
    metrics = await api.metrics()
    assert metrics["flipwatch_profile_used"] == 0
    assert [value for name, value in metrics.items() if name.startswith("flipwatch_profile_info{")] == [1]
    assert not [name for name in metrics if name.startswith("flipwatch_drift_nats")]


async def test_a_model_that_nothing_identifies_is_judged_without(start: Start, server: FakeServer) -> None:
    """No digest is no match."""
    api = await start()
    await _recorded(api)
    server.model_digest = None
    assert "does not fit: Nothing says which model" in (await api.scanned())["finding"]["reason"]


# Moved and removed


async def test_an_exported_profile_can_be_imported(start: Start, server: FakeServer) -> None:
    """Removed and put back it is the same, and used."""
    api = await start()
    await _recorded(api)
    profile = (await api.get(PATH)).json()
    assert (await api.delete(PATH, who="boss")).status_code == 204
    _refused(await api.delete(PATH, who="boss"), 404, "no clean profile")
    assert (await api.scanned())["finding"]["drift_nats"] is None
    answer = await _put(api, profile)
    assert (answer.status_code, answer.json()) == (200, profile)
    assert (await api.scanned())["finding"]["drift_nats"] == 0
    events = [event.what for event in api.sidecar.store.events(2)]
    assert events == ["profile imported", "profile removed"]


async def test_a_foreign_profile_is_refused(start: Start) -> None:
    """Whatever differs is named with both values, and what was there stays."""
    api = await start()
    await _recorded(api)
    profile = (await api.get(PATH)).json()
    foreign = {
        "model_digest": "another",
        "architecture": "OtherForCausalLM",
        "dtype": "float16",
        "engine": "vllm 0.33.0 eager",
        "torch_version": "2.14.0",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "validation_digest": "0123",
    }
    assert {*foreign, "model"} == set(profile["provenance"])
    for field, value in foreign.items():
        answer = await _put(api, profile | {"provenance": profile["provenance"] | {field: value}})
        _refused(answer, 409, f"{field} {value} there, ")
    assert (await api.get(PATH)).json() == profile


async def test_a_profile_of_another_name_is_the_same_model(start: Start) -> None:
    """A name is for people; the digest decides."""
    api = await start()
    await _recorded(api)
    profile = (await api.get(PATH)).json()
    assert (await _put(api, profile | {"provenance": profile["provenance"] | {"model": "alias"}})).status_code == 200


async def test_what_is_no_profile_is_422(start: Start) -> None:
    """Imports are strict and closed."""
    api = await start()
    await _recorded(api)
    profile = (await api.get(PATH)).json()
    wrong = (
        {"format": 2},
        {"more": 1},
        {"recorded_at": 1e300},
        {"base_nats": [2.0, None]},
        {"base_nats": ["2.0"]},
        {"base_nats": [1e308] * 8},
        {"blocks": [{"bss": 1.0}]},
        {"provenance": {}},
    )
    for body in [*(profile | change for change in wrong), [], None, "profile"]:
        assert (await _put(api, body)).status_code == 422, body
    assert (await api.get(PATH)).json() == profile


async def test_a_profile_with_missing_rows_is_refused(start: Start) -> None:
    """A file of the right provenance that lost a block or a sequence would silently be without effect."""
    api = await start()
    await _recorded(api)
    profile = (await api.get(PATH)).json()
    for part in ("blocks", "base_nats"):
        _refused(await _put(api, profile | {part: profile[part][1:]}), 409, "it is damaged")


async def test_nan_is_no_loss(start: Start) -> None:
    """Python's JSON reads NaN; the import does not."""
    api = await start()
    await _recorded(api)
    text = (await api.get(PATH)).text.replace("2.03", "NaN")
    headers = {"authorization": "Bearer token-of-the-boss", "content-type": "application/json"}
    assert (await api.client.put(PATH, content=text, headers=headers)).status_code == 422


async def test_changes_need_the_scope_admin(start: Start) -> None:
    """Whoever may change what is normal could hide a fault; reading is for readers."""
    api = await start()
    for response in (await api.post(PATH, {}), await _put(api, {}, who="operator"), await api.delete(PATH)):
        assert response.status_code == 403
    assert (await api.get(PATH, who="reader")).status_code == 404


async def test_no_profile_is_made_while_a_replica_is_harmed(start: Start, server: FakeServer) -> None:
    """Though the first engine, whose losses it would hold, is healthy; without the harm it is made, and fits all."""
    server.engines, server.harm_in[1] = [0, 1], {4: 5.0}
    api = await start()
    refusal = (await _recorded(api))["profile_refusal"]
    assert "No profile is made of a model that is failed: Engine 1: " in refusal
    server.harm_in.clear()
    assert (await _recorded(api))["profile_refusal"] is None
    finding = (await api.scanned())["finding"]
    assert (finding["health"], finding["profile_recorded_at"] is not None) == ("ok", True)
    server.harm_in[1] = {4: 0.2}
    finding = (await api.scanned())["finding"]
    assert (finding["health"], finding["reason"].startswith("Engine 1: ")) == ("failed", True)
    assert finding["drift_nats"] == pytest.approx(0.2)
