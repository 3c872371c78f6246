"""The differential monitor through the whole sidecar: three references, recordings, refusals, its clock and alerts."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flipwatch.service.alert import BLOCK_DEPARTS, UNKNOWN
from flipwatch.service.settings import Settings
from flipwatch.service.sidecar import Sidecar

from .fake_server import PROBE_TOKEN, FakeServer
from .fake_states import TENSORS

Start = Callable[..., Any]

PATH = "/v1/recordings"
NAME = "differential"


@pytest.fixture
def peer() -> Iterator[FakeServer]:
    """A second fake vLLM."""
    with FakeServer() as fake:
        yield fake


def _of(peer: FakeServer) -> dict[str, Any]:
    return {"reference": "peer", "peer_url": peer.url, "peer_token": PROBE_TOKEN}


async def _ended(api: Any, accepted: Any) -> dict[str, Any]:
    assert accepted.status_code == 202, accepted.text
    await api.sidecar.runner.idle()
    record: dict[str, Any] = (await api.get(accepted.headers["location"])).json()
    return record


async def _compared(api: Any, reference: str | None = None) -> dict[str, Any]:
    """One comparison by request; the scan."""
    body = {"monitor": NAME} | ({} if reference is None else {"reference": reference})
    return await _ended(api, await api.post("/v1/scans", body))


async def _compared_in_vain(api: Any, server: FakeServer) -> dict[str, Any]:
    server.refuse["POST /measurements"] = (502, "Rank 1 failed.")
    scan = await _compared(api)
    server.refuse.clear()
    return scan


async def _recorded(api: Any) -> dict[str, Any]:
    return await _ended(api, await api.post(PATH, {}, who="boss"))


async def _states(api: Any) -> dict[str, str]:
    """Monitor -> health."""
    return {state["monitor"]: state["health"] for state in (await api.get("/v1/states")).json()["states"]}


def _unknown(scan: dict[str, Any], words: str) -> None:
    """The scan could not be done, for this reason, and its finding is unknown."""
    assert (scan["state"], scan["finding"]["health"]) == ("failed", "unknown")
    assert words in scan["error"]


# Recorded states


async def test_recorded_states_are_replayed_and_name_the_block(start: Start, server: FakeServer) -> None:
    """What is recorded is fed back; a block that computes something else is named with its module."""
    api = await start()
    scan = await _recorded(api)
    assert (scan["monitor"], scan["trigger"], scan["recording_refusal"]) == (NAME, "baseline", None)
    assert scan["finding"]["health"] == "ok"
    assert scan["steps_done"] == scan["steps_total"] == 16
    recorded, replayed = server.states.plans
    assert (len(recorded.tokens), {len(row) for row in recorded.tokens}) == (8, {64})
    assert (recorded.noise, recorded.records, replayed.noise) == (True, True, False)
    assert replayed.inputs is not None
    assert (len(replayed.inputs), replayed.inputs_dtype, replayed.tokens) == (8, "bfloat16", recorded.tokens)

    server.states.off[4] = 0.5
    finding = (await _compared(api))["finding"]
    assert (finding["health"], finding["reference"]) == ("failed", "recorded")
    assert [block["block"] for block in finding["blocks"] if block["departs"]] == [4]
    assert finding["blocks"][4]["l2"] == pytest.approx(0.5)
    [location] = finding["locations"]
    assert (location["block"], location["sublayer"], location["module"]) == (4, "mlp", "mlp.down_proj")
    assert server.states.plans[2] == replayed
    assert api.sidecar.store.readings((await api.get("/v1/findings")).json()[0]["id"]) is None


@pytest.mark.parametrize("reference", ["recorded", "checkpoint"])
async def test_every_replica_is_compared(start: Start, server: FakeServer, reference: str) -> None:
    """States of the first engine are held against all; one that departs is the server's finding, and is named."""
    server.engines = [0, 1]
    api = await start()
    assert (await _recorded(api))["recording_refusal"] is None
    assert server.measured == [0, 0, 1]
    assert (await _compared(api, reference))["finding"]["health"] == "ok"
    server.states.off[4], server.states.only = 0.5, 1
    finding = (await _compared(api, reference))["finding"]
    assert server.measured == [0, 0, 1, 0, 1, 0, 1]
    assert (finding["health"], [place["block"] for place in finding["places"]]) == ("failed", [4])
    assert finding["reason"].startswith("Engine 1: ")
    assert finding["reason"].endswith("; engine 0 is ok")


async def test_a_recording_is_shown_without_its_states_and_can_be_removed(start: Start) -> None:
    """Whose it is, since when, how many tokens; what was done with it is in the audit log."""
    api = await start()
    missing = await api.get(PATH)
    assert (missing.status_code, "record them" in missing.json()["detail"]) == (404, True)
    scan = await _recorded(api)
    made = await api.get(PATH, who="reader")
    assert made.json() | {"recorded_at": 0.0} == {
        "recorded_at": 0.0,
        "conditions": {
            "model": "toy-model",
            "model_digest": "0123456789abcdef",
            "architecture": "ToyForCausalLM",
            "num_blocks": 8,
            "dtype": "bfloat16",
            "engine": "vllm 0.32.0 eager",
            "torch_version": "2.13.0",
            "hardware": "cpu AVX512",
            "tensor_parallel_size": 1,
            "flipwatch_version": "0.1.0",
        },
        "sequences": 8,
        "tokens": 512,
        "prefix": 16,
    }
    assert (await api.delete(PATH)).status_code == 403
    assert (await api.post(PATH, {})).status_code == 403
    assert (await api.delete(PATH, who="boss")).status_code == 204
    assert (await api.delete(PATH, who="boss")).status_code == 404
    _unknown(await _compared(api), "record states first")
    events = [(event.actor, event.what) for event in api.sidecar.store.events(3)]
    assert events == [("boss", "states removed"), ("boss", "states recorded"), ("boss", "states asked for")]
    assert api.sidecar.store.events(3)[2].detail == {"scan_id": scan["id"]}


async def test_recorded_states_outlive_the_sidecar_and_vllm(start: Start, server: FakeServer) -> None:
    """They lie in the store; a new process of the same weights is held against them."""
    first = await start()
    await _recorded(first)
    made = (await first.get(PATH)).json()
    await first.sidecar.__aexit__(None, None, None)
    server.restart()
    second = await start()
    assert (await second.get(PATH)).json() == made
    assert (await second.metrics())["flipwatch_recording_timestamp_seconds"] == made["recorded_at"]
    assert (await _compared(second))["finding"]["recorded_at"] == made["recorded_at"]


async def test_states_of_other_weights_do_not_fit(start: Start, server: FakeServer) -> None:
    """After a restart with another checkpoint nothing is claimed, and nothing is measured."""
    api = await start()
    await _recorded(api)
    server.restart()
    server.model_digest = "another"
    measured = len(server.states.plans)
    _unknown(await _compared(api), "with other weights than those that toy-model was loaded with")
    server.model_digest = None
    _unknown(await _compared(api), "Nothing says whose states these are")
    assert len(server.states.plans) == measured


async def test_a_recording_that_cannot_be_read_is_none(start: Start, tmp_path: Path) -> None:
    """What another version has stored does not keep the sidecar from its start."""
    first = await start()
    await _recorded(first)
    await first.sidecar.__aexit__(None, None, None)
    db = sqlite3.connect(tmp_path / "data" / "flipwatch.db")
    db.execute("UPDATE recording SET body = '{}'")
    db.commit()
    db.close()
    second = await start()
    assert (await second.get(PATH)).status_code == 404


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda server: server.gates.__setitem__(3, 0.5), "mitigated (block 3)"),
        (lambda server: setattr(server, "model_digest", None), "no digest of its weights"),
    ],
)
async def test_no_states_where_they_could_not_be_clean(
    start: Start, server: FakeServer, spoil: Callable[[FakeServer], None], words: str
) -> None:
    """Gated blocks and a model that nothing identifies are refused before anything is measured."""
    api = await start()
    spoil(server)
    refused = await api.post(PATH, {}, who="boss")
    assert (refused.status_code, words in refused.json()["detail"]) == (409, True)
    assert server.steps == []


@pytest.mark.parametrize("monitor", ["alpha_scan", "fingerprint", NAME])
async def test_no_states_of_a_model_that_is_known_to_be_damaged(start: Start, server: FakeServer, monitor: str) -> None:
    """A recording of a model that a monitor calls failed, this one by the checkpoint, would approve the damage."""
    api = await start(mitigation={"mode": "observe"}, differential={"reference": "checkpoint"})
    server.states.off[4] = 0.5
    server.harm[4] = 5.0
    server.weights.damage(7, 4)
    await _ended(api, await api.post("/v1/scans", {"monitor": monitor}))
    refused = await api.post(PATH, {}, who="boss")
    assert refused.status_code == 409
    assert f"a model that is failed by {monitor}: " in refused.json()["detail"]


async def test_no_states_with_an_injected_fault(start: Start, server: FakeServer) -> None:
    """Refused when it is there; and void when it comes in between."""
    api = await start(faults={"enabled": True})
    order = {"block": 2, "tensor": "mlp.up_proj", "kind": "zeros"}
    server.hold()
    accepted = await api.post(PATH, {}, who="boss")
    await asyncio.to_thread(server.holding.wait, 10)
    assert (await api.post("/v1/faults", order, who="boss")).status_code == 201
    server.release()
    _unknown(await _ended(api, accepted), "The measurement is void")
    refused = await api.post(PATH, {}, who="boss")
    assert (refused.status_code, "1 injected faults" in refused.json()["detail"]) == (409, True)
    assert (await api.get(PATH)).status_code == 404


async def test_states_that_depart_from_old_ones_may_be_recorded_anew(start: Start, server: FakeServer) -> None:
    """Weights that were changed on purpose depart from what was recorded, until they are recorded."""
    api = await start()
    await _recorded(api)
    server.states.off[4] = 0.5
    assert (await _compared(api))["finding"]["health"] == "failed"
    assert (await _recorded(api))["recording_refusal"] is None
    assert (await _states(api))[NAME] == "ok"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda states: states.nan.add(2), "The loss of the model is not finite"),
        (lambda states: setattr(states, "drifts", True), "The model is failed against its own states"),
    ],
)
async def test_states_that_say_nothing_are_not_kept(
    start: Start, server: FakeServer, spoil: Callable[[Any], None], words: str
) -> None:
    """Values that are not finite, and states that the model itself does not give again; what was kept stays."""
    api = await start()
    await _recorded(api)
    made = (await api.get(PATH)).json()
    spoil(server.states)
    scan = await _recorded(api)
    assert (scan["state"], scan["finding"]["health"]) == ("done", "unknown")
    assert words in scan["recording_refusal"]
    assert scan["recording_refusal"].endswith(".")
    assert words in scan["finding"]["reason"]
    assert (await api.get(PATH)).json() == made


async def test_a_store_that_takes_no_writes_keeps_no_states(start: Start) -> None:
    """The scan says why, and nothing is used that would be gone after a restart."""
    api = await start()
    accepted = await api.post(PATH, {}, who="boss")
    api.sidecar.store._file._db.execute("PRAGMA query_only = 1")
    await api.sidecar.runner.idle()
    assert "cannot be used" in api.sidecar.runner.record(accepted.json()["id"]).recording_refusal
    assert api.sidecar.recordings.current is None


# The checkpoint


async def test_the_checkpoint_names_several_tensors_at_once(start: Start, server: FakeServer) -> None:
    """Nothing has to be recorded; each damaged block is judged by itself, down to element and bit."""
    api = await start(differential={"reference": "checkpoint"})
    assert (await _compared(api))["finding"]["health"] == "ok"
    server.states.off |= {2: 0.5, 5: 0.25}
    finding = (await _compared(api))["finding"]
    assert (finding["health"], finding["action"]) == ("failed", "repair")
    tensors = [location["tensor"] for location in finding["locations"]]
    assert tensors == [f"model.layers.{block}.mlp.down_proj.weight" for block in (2, 5)]
    assert finding["locations"][0]["diagnosis"]["changes"][0]["bits"] == [14]
    assert finding["effort"]["brute_force"] == 8 * TENSORS
    assert {(plan.checkpoint, plan.noise) for plan in server.states.plans} == {(True, True)}


async def test_a_checkpoint_that_cannot_be_used_is_unknown(start: Start, server: FakeServer) -> None:
    """The probe's own sentence, and never ok."""
    api = await start()
    server.refuse["POST /measurements"] = (501, "The checkpoint has no model.layers.3.mlp.down_proj.weight.")
    _unknown(await _compared(api, "checkpoint"), "(HTTP 501): The checkpoint has no model.layers.3")
    server.refuse.clear()
    server.scan_refusal = "ToyLayer keeps a state."
    _unknown(await _compared(api, "checkpoint"), "This model cannot be measured: ToyLayer keeps a state.")


async def test_a_change_of_gates_under_it_is_unknown(start: Start, server: FakeServer) -> None:
    """Numbers of two models are never mixed."""
    api = await start()
    server.hold()
    accepted = await api.post("/v1/scans", {"monitor": NAME, "reference": "checkpoint"})
    await asyncio.to_thread(server.holding.wait, 10)
    server.gates[3] = 0.0
    server.release()
    _unknown(await _ended(api, accepted), "The model was changed while it was measured.")


@pytest.mark.parametrize(("takes", "rows"), [(4096, 8), (200, 3), (64, 1), (20, 1)])
async def test_a_server_is_given_no_more_tokens_than_it_takes(
    start: Start, server: FakeServer, takes: int, rows: int
) -> None:
    """A walk takes all sequences at once: as many as fit, and one that is cut to what fits."""
    api = await start()
    server.max_tokens = takes
    await _compared(api, "checkpoint")
    (plan,) = server.states.plans
    assert len(plan.tokens) == rows
    assert sum(map(len, plan.tokens)) <= takes


# A peer


async def test_a_healthy_peer_is_recorded_first(start: Start, server: FakeServer, peer: FakeServer) -> None:
    """Its states are taken there, replayed here, and neither kept nor counted as time of our engine."""
    api = await start(differential=_of(peer))
    peer.max_tokens = 20
    scan = await _compared(api)
    assert (scan["finding"]["health"], scan["finding"]["reference"]) == ("ok", "peer")
    assert scan["steps_done"] == scan["steps_total"] == 16
    [there], [here] = peer.states.plans, server.states.plans
    assert {len(row) for row in there.tokens} == {20}
    assert (there.noise, there.records, here.inputs_dtype) == (True, True, "bfloat16")
    assert (await api.metrics())["flipwatch_differential_held_seconds_total"] == pytest.approx(0.008)
    assert (await api.get(PATH)).status_code == 404
    server.states.off[6] = 0.5
    peer.model_digest = "the other half of an A/B pair"
    finding = (await _compared(api))["finding"]
    assert [block["block"] for block in finding["blocks"] if block["departs"]] == [6]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda peer: setattr(peer, "flipwatch_version", "0.0.9"), "has another version of Flipwatch: 0.0.9, not 0.1"),
        (lambda peer: setattr(peer, "architecture", "Other"), "has another architecture: Other, not ToyForCausalLM."),
        (lambda peer: setattr(peer, "armed", False), "has another number of blocks: 0, not 8."),
        (lambda peer: setattr(peer, "scan_refusal", "It sleeps."), "cannot be measured: It sleeps."),
        (lambda peer: peer.refuse.update({"POST /measurements": (502, "Rank 1 failed.")}), "Rank 1 failed."),
        (lambda peer: peer.stop(), "cannot be reached"),
    ],
)
async def test_a_peer_that_says_nothing_about_us_is_unknown(
    start: Start, server: FakeServer, peer: FakeServer, spoil: Callable[[FakeServer], None], words: str
) -> None:
    """Another version or model, away, or failing: the reason names the peer, and nothing is measured here."""
    api = await start(differential=_of(peer))
    spoil(peer)
    scan = await _compared(api)
    _unknown(scan, words)
    assert scan["error"].startswith(f"The peer at {peer.url} ")
    assert "POST /measurements" not in server.seen


async def test_a_wrong_token_of_the_peer_is_named_and_never_shown(start: Start, peer: FakeServer) -> None:
    """The sentence names the setting; the token is in no answer."""
    api = await start(differential=_of(peer) | {"peer_token": "secret-of-another"})
    scan = await _compared(api)
    _unknown(scan, "refused the token in differential.peer_token.")
    info = (await api.get("/v1/info")).text
    assert '"peer_token":"**********"' in info
    for text in (info, str(scan), (await api.get("/")).text):
        assert "secret" not in text.replace("secrets", "")
    assert PROBE_TOKEN not in info


async def test_without_a_peer_none_can_be_asked_for(start: Start, server: FakeServer) -> None:
    """409 at once, with the setting's name."""
    api = await start()
    refused = await api.post("/v1/scans", {"monitor": NAME, "reference": "peer"})
    assert (refused.status_code, "differential.peer_url" in refused.json()["detail"]) == (409, True)


# Orders


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"monitor": NAME, "grid": "quick"}, "differential has no grid"),
        ({"reference": "checkpoint"}, "only the monitor differential has a reference"),
        ({"monitor": "fingerprint", "reference": "checkpoint"}, "only the monitor differential has a reference"),
        ({"monitor": NAME, "reference": "nothing"}, "reference"),
    ],
)
async def test_a_wrong_order_is_422(start: Start, server: FakeServer, body: object, words: str) -> None:
    """One sentence that says what to leave out."""
    api = await start()
    refused = await api.post("/v1/scans", body)
    assert (refused.status_code, words in refused.json()["detail"]) == (422, True)
    assert "POST /measurements" not in server.seen


# The clock, states and alerts


async def test_switched_off_it_is_shown_only_after_it_was_asked_for(start: Start, server: FakeServer) -> None:
    """No state that is unknown for good; what was asked for is shown until vLLM is a new process."""
    api = await start()
    _unknown(await _compared(api), "record states first")
    assert NAME not in await _states(api)
    assert 'flipwatch_health_state{monitor="differential",state="unknown"}' not in await api.metrics()
    await _recorded(api)
    _unknown(await _compared_in_vain(api, server), "Rank 1 failed.")
    assert (await _states(api))[NAME] == "ok"
    assert ">differential, scan of" in (await api.get("/", who=None)).text
    server.stop()
    await api.sidecar.schedule.look()
    assert (await _states(api))[NAME] == "unknown"
    server.restart()
    server.start()
    await api.sidecar.schedule.look()
    assert NAME not in await _states(api)


async def test_with_a_clock_it_runs_when_vllm_arrives_after_the_scan(start: Start, server: FakeServer) -> None:
    """Its state is shown from the start, and without recorded states it is unknown and says what to do."""
    api = await start(
        scan={"every_minutes": 60}, fingerprint={"every_minutes": 5}, differential={"every_minutes": 30}, mitigation={}
    )
    await api.sidecar.schedule.met()
    scans = (await api.get("/v1/scans")).json()[::-1]
    assert [scan["monitor"] for scan in scans] == ["fingerprint", "alpha_scan", NAME]
    assert (await _states(api))[NAME] == "unknown"
    [state] = [state for state in (await api.get("/v1/states")).json()["states"] if state["monitor"] == NAME]
    assert "record states first" in state["reason"]
    await _recorded(api)
    await api.sidecar.schedule._scan_by_clock(NAME)
    assert (await _states(api))[NAME] == "ok"
    live = api.sidecar.live
    ended = live.tally(NAME).last_at
    live.now = lambda: ended + 100 * 60
    assert (await _states(api))[NAME] == "unknown"


async def test_k_of_n_departures_are_an_alert_of_their_own(start: Start, server: FakeServer) -> None:
    """The block and the numbers stand in it; an alpha-scan that flags the same block is not counted with it."""
    api = await start(mitigation={"mode": "observe"})
    await _recorded(api)
    server.harm[4] = 5.0
    server.states.off[4] = 0.5
    await api.scanned()
    await _compared(api)
    assert api.sidecar.alerts.firing == []
    await _compared(api)
    [alert] = (await api.get("/v1/states")).json()["alerts"]
    assert (alert["name"], alert["monitor"], alert["block"]) == (BLOCK_DEPARTS, NAME, 4)
    assert alert["summary"] == "Block 4 computes something else than its reference"
    assert "Flagged in 2 of the last 3 findings" in alert["description"]
    assert api.sidecar.alerts.confirmed_blocks(server.boot_id) == frozenset()
    assert (await api.metrics())[f'flipwatch_alert_firing{{alert="{BLOCK_DEPARTS}"}}'] == 1
    server.states.off.clear()
    await _compared(api)
    await _compared(api)
    assert api.sidecar.alerts.firing == []


async def test_a_departure_in_front_of_the_blocks_is_an_alert_without_a_block(start: Start, server: FakeServer) -> None:
    """A damaged embedding is no block's fault, and still pages."""
    api = await start()
    await _recorded(api)
    server.states.embedding = 0.5
    for _ in range(2):
        assert (await _compared(api))["finding"]["health"] == "failed"
    [alert] = api.sidecar.alerts.firing
    assert (alert.name, alert.block) == (BLOCK_DEPARTS, None)
    assert "no block is the cause" in alert.summary


async def test_alerts_outlive_the_sidecar_though_it_runs_on_request(
    settings: Callable[..., Settings], start: Start, server: FakeServer
) -> None:
    """What was found twice still fires."""
    api = await start()
    await _recorded(api)
    server.states.off[4] = 0.5
    await _compared(api)
    await _compared(api)
    await api.sidecar.__aexit__(None, None, None)
    async with Sidecar(settings()) as after:
        assert [(alert.name, alert.block) for alert in after.alerts.firing] == [(BLOCK_DEPARTS, 4)]


@pytest.mark.parametrize(("every", "alerts"), [(None, []), (60, [(UNKNOWN, NAME)])])
async def test_only_a_monitor_with_a_clock_alerts_on_what_is_unknown(
    start: Start, every: float | None, alerts: list[tuple[str, str]]
) -> None:
    """Who asks for a comparison that cannot be made is told; nobody else is paged."""
    api = await start(differential={"every_minutes": every})
    await api.sidecar.schedule.met()
    for _ in range(3):
        _unknown(await _compared(api), "record states first")
    assert [(alert.name, alert.monitor) for alert in api.sidecar.alerts.firing] == alerts


async def test_a_repair_is_followed_by_a_comparison(start: Start, server: FakeServer) -> None:
    """What departed before is compared again with the same reference, so that its state does not lie."""
    api = await start()
    await _recorded(api)
    server.weights.damage(7, 4)
    server.states.off[4] = 0.5
    await _compared(api, "checkpoint")
    accepted = await api.post("/v1/mitigations", {"action": "repair"})
    assert accepted.status_code == 202, accepted.text
    server.states.off.clear()
    await api.sidecar.mitigator.settled()
    await asyncio.gather(*api.sidecar._followers)
    last = (await api.get("/v1/scans")).json()[0]
    assert (last["monitor"], last["trigger"]) == (NAME, "verification")
    assert server.states.plans[-1].checkpoint
    assert (await _states(api))[NAME] == "ok"


async def test_the_numbers_are_metrics(start: Start, server: FakeServer) -> None:
    """Distances with their reference, what is allowed, which depart, and what it took."""
    api = await start()
    await _recorded(api)
    server.states.off[4] = 0.5
    await _compared(api)
    metrics = await api.metrics()
    assert (
        metrics['flipwatch_block_divergence{block="4",measure="l2",model_name="toy-model",reference="recorded"}'] > 0.4
    )
    at = '{block="4",model_name="toy-model"}'
    assert metrics[f"flipwatch_block_divergence_allowed{at}"] == 0
    assert metrics[f"flipwatch_block_departs{at}"] == 1
    assert metrics['flipwatch_block_departs{block="5",model_name="toy-model"}'] == 0
    assert metrics['flipwatch_walk_divergence{block="5",model_name="toy-model"}'] == pytest.approx(0.5)
    assert metrics["flipwatch_differentials_total"] == 2
    assert metrics["flipwatch_differential_failures_total"] == 0
    assert metrics['flipwatch_differentials_skipped_total{reason="running"}'] == 0
    assert metrics["flipwatch_sweeps_total"] == metrics["flipwatch_scans_total"] == 0
    server.states.nan.add(2)
    await _compared(api)
    metrics = await api.metrics()
    assert (
        'flipwatch_block_divergence{block="2",measure="l2",model_name="toy-model",reference="recorded"}' not in metrics
    )
    assert metrics['flipwatch_block_departs{block="2",model_name="toy-model"}'] == 1


async def test_a_limit_takes_the_place_of_noise(start: Start, server: FakeServer) -> None:
    """A block that lies nearer than the limit does not depart."""
    api = await start(differential={"limit": 0.2})
    await _recorded(api)
    server.states.off |= {3: 0.1, 5: 0.3}
    finding = (await _compared(api))["finding"]
    assert [block["block"] for block in finding["blocks"] if block["departs"]] == [5]
    assert {block["allowed"] for block in finding["blocks"]} == {0.2}
