"""Scans through the whole sidecar: found, failed, void, restarted, paced."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flipwatch.service.records import ScanState

from .fake_server import FakeServer

Start = Callable[..., Any]


async def test_a_healthy_model_is_ok_with_numbers_in_the_reason(start: Start) -> None:
    """No block of the healthy toy is flagged, and the state says on what it rests."""
    api = await start()
    scan = await api.scanned()
    assert scan["state"] == "done"
    assert scan["steps_done"] == scan["steps_total"]
    assert scan["finding"]["health"] == "ok"
    state = (await api.get("/v1/states")).json()["states"][0]
    assert state["health"] == "ok"
    assert "nats" in state["reason"]


async def test_before_the_first_scan_the_state_is_unknown(start: Start) -> None:
    """No data is unknown, never ok."""
    api = await start()
    state = (await api.get("/v1/states")).json()["states"][0]
    assert state["health"] == "unknown"


async def test_a_harmful_block_is_flagged_in_states_blocks_and_metrics(start: Start, server: FakeServer) -> None:
    """The block that does harm is named everywhere, and no other one."""
    server.harm[4] = 5.0
    api = await start()
    scan = await api.scanned()
    assert scan["finding"]["flagged"] == [4]
    state = (await api.get("/v1/states")).json()["states"][0]
    assert (state["health"], state["action"], state["flagged"]) == ("failed", "skip", [4])
    blocks = (await api.get("/v1/blocks")).json()
    assert [block["block"] for block in blocks if block["flagged"]] == [4]
    metrics = await api.metrics()
    assert metrics['flipwatch_block_flagged{block="4",model_name="toy-model"}'] == 1
    assert metrics['flipwatch_block_flagged{block="3",model_name="toy-model"}'] == 0
    assert metrics['flipwatch_block_zscore{block="4",model_name="toy-model",reference="blocks",score="skip_gain"}'] > 6


async def test_harmful_blocks_are_found_one_after_the_other(start: Start, server: FakeServer) -> None:
    """One scan measures on without the block that it found, until none stands out; served gates stay as they are."""
    server.harm[4], server.harm[6] = 5.0, 2.0
    server.nan.add(1)
    api = await start()
    finding = (await api.scanned())["finding"]
    assert finding["flagged"] == [1, 4, 6]
    assert "with block 1, block 4 left out" in finding["reason"]
    expected = server.loss(0, {1: 0.0, 4: 0.0, 6: 0.0}) + 0.035
    assert finding["predicted_loss_nats"] == pytest.approx(expected)
    assert server.gates == [1.0] * 8
    assert server.seen.count("POST /measurements") == 3


async def test_a_harmful_block_of_one_replica_is_the_servers(start: Start, server: FakeServer) -> None:
    """Each engine is scanned by itself; the worst speaks for the server and is named, and so is a loss that it has."""
    server.engines = [0, 1, 2]
    api = await start()
    finding = (await api.scanned())["finding"]
    assert finding["health"] == "ok"
    assert finding["reason"].startswith("Engine 0: ")
    assert finding["reason"].endswith("; engine 1 is ok, engine 2 is ok")
    server.harm_in[1] = {4: 5.0}
    scan = await api.scanned()
    finding = scan["finding"]
    assert scan["steps_done"] == scan["steps_total"]
    assert (finding["health"], finding["flagged"]) == ("failed", [4])
    assert finding["reason"].startswith("Engine 1: ")
    assert finding["reason"].endswith("; engine 0 is ok, engine 2 is ok")
    # The second engine is scanned again without the block, the others are not.
    assert server.measured == [0, 1, 2, 0, 1, 1, 2]
    assert await api.sidecar.scans.loss() == pytest.approx(finding["base_loss_nats"])


async def test_no_more_harmful_blocks_are_looked_for_than_wanted(start: Start, server: FakeServer) -> None:
    """With `scan.max_faults` of 1 the scan ends behind the strongest; the other is named as its shadow."""
    server.harm[4], server.harm[6] = 5.0, 2.0
    api = await start(scan={"max_faults": 1})
    finding = (await api.scanned())["finding"]
    assert finding["flagged"] == [4]
    assert "also better without block 6 (+1.690), perhaps by the same fault" in finding["reason"]


async def test_a_nan_model_is_failed_in_states_metrics_and_alert(start: Start, server: FakeServer) -> None:
    """NaN is a state of its own and never a number."""
    server.nan.add(2)
    api = await start()
    await api.scanned()
    states = (await api.get("/v1/states")).json()
    assert states["states"][0]["health"] == "failed"
    assert "not finite" in states["states"][0]["reason"]
    assert "FlipwatchModelNotFinite" in [alert["name"] for alert in states["alerts"]]
    metrics = await api.metrics()
    assert metrics['flipwatch_base_loss_finite{model_name="toy-model"}'] == 0
    assert 'flipwatch_base_loss_nats{model_name="toy-model"}' not in metrics
    assert metrics['flipwatch_health_state{monitor="alpha_scan",state="failed"}'] == 1
    assert metrics['flipwatch_alert_firing{alert="FlipwatchModelNotFinite"}'] == 1
    assert not [name for name, value in metrics.items() if value != value]


async def test_a_refused_scan_is_unknown_with_the_probes_words(start: Start, server: FakeServer) -> None:
    """A failure of any kind is an unknown finding with its reason, counted, and the next scan goes on."""
    server.refuse["POST /measurements"] = (502, "Rank 1 failed.")
    api = await start()
    scan = await api.scanned()
    assert scan["state"] == "failed"
    assert scan["finding"]["health"] == "unknown"
    assert "Rank 1 failed." in scan["error"]
    assert (await api.metrics())["flipwatch_scan_failures_total"] == 1
    server.refuse.clear()
    assert (await api.scanned())["finding"]["health"] == "ok"


async def test_a_fault_of_our_own_is_unknown_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one broad catch turns an exception in a monitor into an unknown finding."""
    api = await start()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(api.sidecar.scans._monitor, "judge", broken)
    scan = await api.scanned()
    assert scan["finding"]["health"] == "unknown"
    assert "ZeroDivisionError: by design" in scan["error"]


async def test_a_model_that_cannot_be_scanned_says_so(start: Start, server: FakeServer) -> None:
    """The probe's refusal is the reason of the state."""
    server.scan_refusal = "ToyLayer has recurrent state."
    api = await start()
    assert "recurrent state" in (await api.scanned())["error"]


async def test_a_void_measurement_is_unknown(start: Start, server: FakeServer) -> None:
    """Gates that change under a scan void it: its numbers would mix two models."""
    api = await start()
    server.hold()
    accepted = await api.post("/v1/scans", {})
    await asyncio.to_thread(server.holding.wait, 10)
    server.void()
    server.release()
    await api.sidecar.runner.idle()
    scan = (await api.get(accepted.headers["location"])).json()
    assert scan["finding"]["health"] == "unknown"
    assert "void" in scan["error"]
    assert server.measurements == 0


async def test_a_restart_is_seen_and_scans_resume(start: Start, server: FakeServer) -> None:
    """After a restart of vLLM the state is unknown, the gates are the new process's, and a scan works again."""
    server.harm[4] = 5.0
    server.gates[1] = 0.5
    api = await start()
    await api.scanned()
    server.restart()
    await api.sidecar.schedule.look()
    states = (await api.get("/v1/states")).json()
    assert states["states"][0]["health"] == "unknown"
    assert "restarted" in states["states"][0]["reason"]
    assert states["boot_id"] == server.boot_id
    assert states["gates"] == [1.0] * 8
    assert (await api.metrics())["flipwatch_vllm_restarts_seen_total"] == 1
    assert (await api.scanned())["finding"]["health"] == "ok"


async def test_a_restart_under_a_scan_is_unknown_and_named(start: Start, server: FakeServer) -> None:
    """A scan that began in the old process does not end as a finding about the new one."""
    api = await start()
    server.hold()
    accepted = await api.post("/v1/scans", {})
    await asyncio.to_thread(server.holding.wait, 10)
    server.restart()
    server.release()
    await api.sidecar.runner.idle()
    scan = (await api.get(accepted.headers["location"])).json()
    assert (scan["state"], scan["finding"]["health"]) == ("failed", "unknown")
    assert "restarted" in scan["error"]


async def test_an_absent_vllm_makes_every_state_unknown_until_it_is_back(start: Start, server: FakeServer) -> None:
    """While the probe is away nothing is claimed, no block value is exported; the same process back is known again."""
    api = await start()
    await api.scanned()
    server.stop()
    await api.sidecar.schedule.look()
    states = (await api.get("/v1/states")).json()
    assert (states["up"], states["states"][0]["health"]) == (False, "unknown")
    metrics = await api.metrics()
    assert metrics["flipwatch_up"] == 0
    assert not [name for name in metrics if name.startswith("flipwatch_block_")]
    assert (await api.post("/v1/scans", {})).status_code == 503
    server.start()
    await api.sidecar.schedule.look()
    assert (await api.get("/v1/states")).json()["states"][0]["health"] == "ok"


async def test_inert_gates_are_said_and_no_skip_is_suggested(start: Start, server: FakeServer) -> None:
    """A failed self-test is in the state, and a mitigation is not offered."""
    server.self_test_passes = False
    server.harm[4] = 5.0
    api = await start()
    await api.scanned()
    states = (await api.get("/v1/states")).json()
    assert states["mitigation"]["offered"] is False
    assert "inert" in states["mitigation"]["reason"]
    assert states["states"][0]["action"] == "investigate"
    assert "inert" in states["states"][0]["reason"]
    refused = await api.post("/v1/mitigations", {"action": "skip", "blocks": [4]})
    assert refused.status_code == 403
    assert "inert" in refused.json()["detail"]


async def test_only_one_scan_runs_at_a_time(start: Start, server: FakeServer) -> None:
    """A second request answers 409; one that was due by the clock is counted as skipped."""
    api = await start()
    server.hold()
    assert (await api.post("/v1/scans", {})).status_code == 202
    await asyncio.to_thread(server.holding.wait, 10)
    second = await api.post("/v1/scans", {})
    assert second.status_code == 409
    assert (await api.get("/v1/states")).json()["scanning"] is True
    await api.sidecar.schedule._scan_by_clock("alpha_scan")
    assert (await api.metrics())['flipwatch_scans_skipped_total{reason="running"}'] == 1
    server.release()
    await api.sidecar.runner.idle()


async def test_parts_grow_to_the_budget_and_not_beyond(start: Start, server: FakeServer) -> None:
    """A scan begins with one step, grows twofold, and settles at the budget of a part; the next one stays there."""
    server.seconds_per_step = 0.01
    api = await start(scan={"part_budget_ms": 61})
    await api.scanned()
    assert server.steps[:4] == [1, 2, 4, 6]
    assert max(server.steps) == 6
    await api.scanned()
    assert server.steps[4:] == [6] * 4


async def test_a_slow_engine_gets_single_steps(start: Start, server: FakeServer) -> None:
    """When one step takes longer than the budget, parts are single steps."""
    server.seconds_per_step = 0.2
    api = await start(scan={"part_budget_ms": 50})
    await api.scanned()
    assert set(server.steps) == {1}


async def test_steps_that_take_too_long_are_made_smaller(start: Start, server: FakeServer) -> None:
    """A scan begins again with fewer tokens in a step until a step keeps to the budget; later scans grow again."""
    server.seconds_per_token = 0.05 / 100
    api = await start(scan={"part_budget_ms": 50}, validation={"max_tokens": 8})
    await api.scanned()
    sizes = [plan["tokens_per_step"] for plan in server.plans]
    assert sizes[0] == 512
    assert max(sizes[-1], 51) <= 100
    assert [plan["tokens_per_loss"] for plan in server.plans] == [size // 4 for size in sizes]
    server.seconds_per_token = 0.0
    for _ in range(4):
        await api.scanned()
    assert server.plans[-1]["tokens_per_step"] == 512


async def test_steps_of_one_sequence_are_not_made_smaller(start: Start, server: FakeServer) -> None:
    """Where a step has one sequence, a scan goes on however long it takes."""
    server.seconds_per_step = 10.0
    api = await start(scan={"part_budget_ms": 50})
    assert (await api.scanned())["finding"]["health"] == "ok"
    assert len(server.plans) < 12


@pytest.mark.parametrize(("requests", "share"), [(3, 0.1), (None, 0.1), (0, 0.5)])
async def test_rests_keep_the_engine_free_for_its_share(
    start: Start, server: FakeServer, requests: int | None, share: float
) -> None:
    """Between two parts the engine is left alone: longer while requests are there, or may be, than without any."""
    server.seconds_per_step, server.requests = 1.0, requests
    api = await start(scan={"part_budget_ms": 1000, "duty": 0.1, "idle_duty": 0.5})
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    measurer = api.sidecar.scans._measure._measurer
    measurer._rest = rest
    measurer._duty._clock = lambda: sum(rests)
    await api.scanned()
    # Nothing was held in front of the first part, and nothing waits behind the last.  The fake does not really hold.
    assert rests[0] == 0.0
    assert rests[1:] == pytest.approx([1 / share - 1] * (len(server.steps) - 1))


async def test_requests_in_the_queue_go_first_but_not_before_a_mitigation(start: Start, server: FakeServer) -> None:
    """A part of a scan gives them half a second; a measurement for which a mitigation waits gives them none."""
    api = await start()
    await api.scanned()
    assert set(server.patience) == {0.5}
    server.patience.clear()
    assert await api.sidecar.runner.alone(api.sidecar.scans.loss) is not None
    assert set(server.patience) == {0.0}


async def test_what_a_mitigation_measures_is_counted_but_not_delayed(start: Start, server: FakeServer) -> None:
    """It never rests, and the next scan rests for it."""
    server.seconds_per_step = 0.5
    api = await start(scan={"part_budget_ms": 500, "duty": 0.01})
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    api.sidecar.scans._measure._measurer._rest = rest
    await api.sidecar.runner.alone(api.sidecar.scans.loss)
    assert rests == []
    await api.scanned()
    assert rests[0] > 10.0


async def test_a_finished_measurement_is_not_dropped_again(start: Start, server: FakeServer) -> None:
    """With its reading the probe forgets a measurement: a DELETE would only be an error in vLLM's log."""
    api = await start()
    await api.scanned()
    assert await api.sidecar.runner.alone(api.sidecar.scans.loss) is not None
    assert server.measurements == 0
    assert not [call for call in server.seen if call.startswith("DELETE")]


async def test_a_server_with_small_steps_can_be_scanned(start: Start, server: FakeServer) -> None:
    """Sequences and block calls keep to what vLLM takes in one step, all alphas together."""
    server.max_tokens = 100
    api = await start(scan={"grid": "full"})
    assert (await api.scanned())["finding"]["health"] == "ok"
    server.max_tokens = 10
    assert "larger --max-num-batched-tokens" in (await api.scanned())["error"]


async def test_an_old_finding_is_unknown_where_the_clock_scans(start: Start, server: FakeServer) -> None:
    """When three scans that were due have left no finding, nothing is claimed any more."""
    server.harm[4] = 5.0
    api = await start(scan={"every_minutes": 60})
    await api.sidecar.runner.idle()
    live = api.sidecar.live
    tally = live.tally("alpha_scan")
    ended = tally.last_at
    live.now = lambda: ended + 179 * 60
    assert (await api.get("/v1/states")).json()["states"][0]["health"] == "failed"
    live.now = lambda: ended + 181 * 60
    state = (await api.get("/v1/states")).json()["states"][0]
    assert (state["health"], state["flagged"]) == ("unknown", [])
    assert state["reason"] == "The last finding is 181 minutes old, though a scan is due every 60."
    assert (await api.metrics())['flipwatch_health_state{monitor="alpha_scan",state="unknown"}'] == 1
    # A scan that takes an hour and a half by itself is not late after three.
    tally.last_seconds = 90 * 60.0
    assert (await api.get("/v1/states")).json()["states"][0]["health"] == "failed"


async def test_without_a_clock_no_finding_is_old(start: Start) -> None:
    """Who scans by hand decides how long a finding counts."""
    api = await start()
    await api.scanned()
    api.sidecar.live.now = lambda: 1e12
    assert (await api.get("/v1/states")).json()["states"][0]["health"] == "ok"


async def test_stopping_the_sidecar_drops_the_measurement(start: Start, server: FakeServer) -> None:
    """A scan that is cut off leaves nothing on the probe, and its record says why it ended."""
    api = await start()
    server.hold()
    accepted = await api.post("/v1/scans", {})
    await asyncio.to_thread(server.holding.wait, 10)
    interrupted = asyncio.create_task(api.sidecar.runner.interrupt("The sidecar was stopped."))
    server.release()
    await interrupted
    scan = (await api.get(accepted.headers["location"])).json()
    assert (scan["state"], scan["error"]) == ("failed", "The sidecar was stopped.")
    assert server.measurements == 0
    assert (await api.get("/v1/states")).json()["states"][0]["reason"].startswith("No scan")


async def test_a_scan_interrupted_before_its_first_step_is_ended(start: Start) -> None:
    """A task that is cancelled before it ran cannot end its own record: somebody else does."""
    api = await start()
    accepted = await api.post("/v1/scans", {})
    await api.sidecar.runner.interrupt("Not now.")
    assert (await api.get(accepted.headers["location"])).json()["state"] == "failed"


async def test_scans_that_a_killed_sidecar_left_are_ended(start: Start) -> None:
    """A record that still says running after a start would run for ever."""
    api = await start()
    runner = api.sidecar.runner
    scan = await api.scanned()
    record = api.sidecar.store.scan(scan["id"])
    api.sidecar.store.save_scan(record.model_copy(update={"state": ScanState.RUNNING}))
    runner._model.progress = None
    runner.forget_unfinished()
    assert (await api.get(f"/v1/scans/{scan['id']}")).json()["state"] == "failed"


async def test_a_scan_runs_after_every_n_served_requests(start: Start, server: FakeServer) -> None:
    """vLLM's own counter triggers the scan, and a restarted counter starts over."""
    api = await start(scan={"every_requests": 10})
    server.serve(9)
    await api.sidecar.schedule.look()
    assert (await api.get("/v1/scans")).json() == []
    server.serve(1)
    await api.sidecar.schedule.look()
    await api.sidecar.runner.idle()
    assert [scan["trigger"] for scan in (await api.get("/v1/scans")).json()] == ["requests"]
    server._served = 0
    await api.sidecar.schedule.look()
    server.serve(10)
    await api.sidecar.schedule.look()
    await api.sidecar.runner.idle()
    assert len((await api.get("/v1/scans")).json()) == 2


async def test_with_a_clock_the_first_scan_does_not_wait(start: Start, server: FakeServer) -> None:
    """An hourly scan begins as soon as vLLM answers, and again after a restart."""
    api = await start(scan={"every_minutes": 60})
    await api.sidecar.runner.idle()
    assert len((await api.get("/v1/scans")).json()) == 1
    await api.sidecar.schedule.look()
    await api.sidecar.runner.idle()
    assert len((await api.get("/v1/scans")).json()) == 1
    server.restart()
    await api.sidecar.schedule.look()
    await api.sidecar.runner.idle()
    assert len((await api.get("/v1/scans")).json()) == 2


async def test_the_clock_really_ticks(start: Start, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """APScheduler runs the look by itself: a restart is noticed without anybody asking."""
    api = await start(vllm={"poll_seconds": 0.05})
    noticed = asyncio.Event()
    monkeypatch.setattr(api.sidecar.live, "restarted", noticed.set)
    server.restart()
    async with asyncio.timeout(10):
        await noticed.wait()
