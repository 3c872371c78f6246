"""Sweeps through the whole sidecar: clean, changed, refused, restarted; new baselines and checks of the checkpoint."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flipwatch.monitors.fingerprint.facts import NotCovered
from flipwatch.service.alert import UNKNOWN, VERDICT, WEIGHTS_CHANGED
from flipwatch.service.records import ScanTrigger
from flipwatch.service.settings import Settings
from flipwatch.service.sidecar import Sidecar

from .fake_server import FakeServer

Start = Callable[..., Any]

SWEEP = {"monitor": "fingerprint"}


async def _ended(api: Any, accepted: Any) -> dict[str, Any]:
    """The scan that was accepted, once it has ended."""
    assert accepted.status_code == 202, accepted.text
    await api.sidecar.runner.idle()
    record: dict[str, Any] = (await api.get(accepted.headers["location"])).json()
    return record


async def _swept(api: Any) -> dict[str, Any]:
    """One sweep by request."""
    return await _ended(api, await api.post("/v1/scans", SWEEP))


async def _checked(api: Any) -> dict[str, Any]:
    """One check of the checkpoint."""
    return await _ended(api, await api.post("/v1/integrity/checkpoint", {}))


async def _recorded(api: Any, reason: str = "weight sync") -> dict[str, Any]:
    """A new baseline."""
    return await _ended(api, await api.post("/v1/integrity", {"reason": reason}, who="boss"))


async def _state(api: Any) -> dict[str, Any]:
    """The fingerprint's state."""
    states = (await api.get("/v1/states")).json()["states"]
    [state] = [state for state in states if state["monitor"] == "fingerprint"]
    return dict(state)


async def _events(api: Any, what: str) -> list[dict[str, Any]]:
    """Lines of the audit log of this kind, newest first."""
    return [event for event in (await api.get("/v1/events")).json() if event["what"] == what]


async def test_a_clean_sweep_is_ok_in_state_metrics_and_record(start: Start, server: FakeServer) -> None:
    """All chunks are looked at in parts, and the numbers stand in the sentence and in the metrics."""
    api = await start()
    assert (await _state(api))["health"] == "unknown"
    scan = await _swept(api)
    assert (scan["monitor"], scan["state"], scan["trigger"]) == ("fingerprint", "done", "request")
    assert scan["steps_done"] == scan["steps_total"] == 40
    assert len(server.steps) > 1
    state = await _state(api)
    assert (state["health"], state["action"]) == ("ok", "none")
    assert "All 40 chunks (41.9 MB) of 1 rank are those of the baseline of 1970-01-01 00:16:40 UTC" in state["reason"]
    metrics = await api.metrics()
    rank = '{model_name="toy-model",rank="0"}'
    assert metrics[f"flipwatch_weights_covered_bytes{rank}"] == 40 * 2**20
    assert metrics[f"flipwatch_weights_changed_chunks{rank}"] == 0
    assert metrics["flipwatch_sweeps_total"] == 1
    assert metrics["flipwatch_scans_total"] == 0
    assert "flipwatch_last_scan_timestamp_seconds" not in metrics


async def test_a_changed_chunk_is_failed_named_and_alerted_on_at_once(start: Start, server: FakeServer) -> None:
    """One sweep is enough for the alert, one clean sweep ends it; alpha-scans in between change neither."""
    api = await start(mitigation={"mode": "observe"})
    server.weights.damage(7, 4)
    finding = (await _swept(api))["finding"]
    assert (finding["health"], finding["action"], finding["bad_chunks"], finding["blocks"]) == (
        "failed",
        "repair",
        1,
        [4],
    )
    assert "rank 0, model.layers.4.mlp.up_proj.weight, block 4, chunk 7: 1 bit of" in finding["reason"]
    await api.scanned()
    states = (await api.get("/v1/states")).json()
    assert [(alert["name"], alert["monitor"], alert["block"]) for alert in states["alerts"]] == [
        (VERDICT, "verdict", None),
        (WEIGHTS_CHANGED, "fingerprint", None),
    ]
    assert states["alerts"][1]["description"] == finding["reason"]
    server.weights.bad.clear()
    await _swept(api)
    assert (await api.get("/v1/states")).json()["alerts"] == []


async def test_an_order_to_repair_takes_what_a_sweep_has_just_found(start: Start, server: FakeServer) -> None:
    """Within a minute, of the same process and faults, nothing is swept again before the order is answered."""
    api = await start()
    server.weights.damage(7, 4)
    await _swept(api)
    facts = await api.sidecar.probe.facts()
    assert api.sidecar.sweeps.recent(facts) is not None
    for other in ({"boot_id": "another"}, {"faults": ["another"]}):
        assert api.sidecar.sweeps.recent(facts.model_copy(update=other)) is None
    before = len(server.steps)
    server.hold()
    accepted = await api.post("/v1/mitigations", {"action": "repair"})
    assert (accepted.status_code, len(server.steps)) == (202, before)
    server.release()
    await api.sidecar.mitigator.settled()
    record = (await api.get(accepted.headers["location"])).json()
    assert (record["state"], record["repairs"][0]["method"]) == ("repaired", "parity")
    now = api.sidecar.sweeps._now
    api.sidecar.sweeps._now = lambda: now() + 61.0
    assert api.sidecar.sweeps.recent(await api.sidecar.probe.facts()) is None


async def test_what_no_digest_covers_is_unknown(start: Start, server: FakeServer) -> None:
    """Coverage is a metric of its own, and the state says which tensor is missing."""
    server.integrity.not_covered = [NotCovered(tensor="packed", bytes=2**20, reason="It is packed.")]
    api = await start()
    await _swept(api)
    assert "1.0 MB of 43.0 MB are not covered, first packed of rank 0: It is packed" in (await _state(api))["reason"]
    assert (await _state(api))["health"] == "unknown"
    metrics = await api.metrics()
    rank = '{model_name="toy-model",rank="0"}'
    covered = metrics[f"flipwatch_weights_covered_bytes{rank}"]
    assert metrics[f"flipwatch_weights_bytes{rank}"] - covered == 2**20


async def test_a_probe_without_fingerprints_is_unknown_with_a_sentence(start: Start, server: FakeServer) -> None:
    """A refusal, an older probe and a model without baselines end as failed scans that say why."""
    api = await start()
    server.refuse["GET /integrity"] = (501, "The model is sharded.")
    scan = await _swept(api)
    assert (scan["state"], scan["finding"]["health"]) == ("failed", "unknown")
    assert scan["error"] == "The probe has no fingerprints (HTTP 501): The model is sharded."
    server.refuse.clear()
    server.integrity.old = True
    assert "install the same version of Flipwatch on both sides" in (await _swept(api))["error"]
    old = await api.get("/v1/integrity")
    assert (old.status_code, "same version" in old.json()["detail"]) == (404, True)
    server.integrity.old = False
    server.integrity.refusal = "The weights are on a meta device."
    assert "There are no fingerprints of the weights: The weights are on a meta" in (await _swept(api))["error"]
    assert (await _state(api))["health"] == "unknown"
    [alert] = (await api.get("/v1/states")).json()["alerts"]
    assert (alert["name"], alert["monitor"]) == (UNKNOWN, "fingerprint")
    assert "findings of fingerprint" in alert["description"]
    assert (await api.metrics())["flipwatch_sweep_failures_total"] == 3


async def test_unknown_findings_of_two_monitors_are_two_alerts(start: Start, server: FakeServer) -> None:
    """Neither counts for the other: one unknown of each is no alert, two of each are two, one metric."""
    api = await start()
    server.refuse["POST /measurements"] = (502, "Rank 1 failed.")
    await _swept(api)
    await api.scanned()
    assert api.sidecar.alerts.firing == []
    await _swept(api)
    await api.scanned()
    firing = [(alert.name, alert.monitor) for alert in api.sidecar.alerts.firing]
    assert firing == [(UNKNOWN, "alpha_scan"), (UNKNOWN, "fingerprint")]
    assert (await api.metrics())[f'flipwatch_alert_firing{{alert="{UNKNOWN}"}}'] == 1


async def test_a_restart_under_a_sweep_is_unknown_and_named(start: Start, server: FakeServer) -> None:
    """Bytes of one process are never judged by the baseline of another."""
    api = await start()
    server.hold()
    accepted = await api.post("/v1/scans", SWEEP)
    await asyncio.to_thread(server.holding.wait, 10)
    server.restart()
    server.release()
    scan = await _ended(api, accepted)
    assert (scan["state"], scan["finding"]["health"]) == ("failed", "unknown")
    assert "restarted" in scan["error"]
    server.integrity.boot_id = "another"
    assert "restarted" in (await _swept(api))["error"]


async def test_a_restart_forgets_what_was_known_of_the_bytes(start: Start, server: FakeServer) -> None:
    """Metrics of the old process are gone, its check too, and the state is unknown."""
    api = await start()
    await _checked(api)
    assert (await api.metrics())['flipwatch_checkpoint_verified{model_name="toy-model"}'] == 1
    server.restart()
    await api.sidecar.schedule.look()
    assert (await _state(api))["health"] == "unknown"
    assert not [name for name in await api.metrics() if name.startswith(("flipwatch_weights_", "flipwatch_checkpoint"))]
    assert (await api.get("/v1/integrity")).json()["verdict"] is None


# The clock


async def test_with_a_clock_a_sweep_runs_when_vllm_arrives_and_before_the_scan(
    start: Start, server: FakeServer
) -> None:
    """The quick look at the bytes first, then the check if it is wanted, then the scan; again after a restart."""
    api = await start(
        scan={"every_minutes": 60}, fingerprint={"every_minutes": 5, "check_checkpoint": True}, mitigation={}
    )
    await api.sidecar.schedule.met()
    scans = (await api.get("/v1/scans")).json()[::-1]
    assert [(scan["monitor"], scan["state"]) for scan in scans] == [
        ("fingerprint", "done"),
        ("fingerprint", "done"),
        ("alpha_scan", "done"),
    ]
    assert len(await _events(api, "checkpoint checked")) == 1
    await api.sidecar.schedule.look()
    await api.sidecar.schedule.met()
    assert len((await api.get("/v1/scans")).json()) == 3
    server.restart()
    await api.sidecar.schedule.look()
    await api.sidecar.schedule.met()
    assert len((await api.get("/v1/scans")).json()) == 6


async def test_the_check_at_arrival_waits_behind_a_sweep_by_the_clock(
    start: Start, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that begins in the moment in which the first one has ended does not cost the check of the checkpoint."""
    api = await start(fingerprint={"every_minutes": 5, "check_checkpoint": True}, mitigation={})
    schedule, runner = api.sidecar.schedule, api.sidecar.runner
    await schedule.met()
    assert len(await _events(api, "checkpoint checked")) == 1
    idle, swept = runner.idle, []

    async def idle_for_a_moment() -> None:
        await idle()
        if not swept:
            swept.append(runner.start(schedule._jobs["fingerprint"](ScanTrigger.SCHEDULE)))

    server.restart()
    monkeypatch.setattr(runner, "idle", idle_for_a_moment)
    await schedule.look()
    await schedule.met()
    assert swept
    assert len(await _events(api, "checkpoint checked")) == 2


async def test_a_sweep_that_is_due_runs_between_the_parts_of_a_scan_and_is_skipped_by_a_sweep(
    start: Start, server: FakeServer
) -> None:
    """A long scan holds no sweep back: their parts alternate.  The same monitor twice is counted."""
    api = await start(scan={"part_budget_ms": 1})
    schedule = api.sidecar.schedule
    server.hold()
    await api.post("/v1/scans", {})
    await asyncio.to_thread(server.holding.wait, 10)
    due = asyncio.create_task(schedule._scan_by_clock("fingerprint"))
    await asyncio.sleep(0)
    server.release()
    await due
    await api.sidecar.runner.idle()
    scans = (await api.get("/v1/scans")).json()
    assert {(scan["monitor"], scan["state"]) for scan in scans} == {("fingerprint", "done"), ("alpha_scan", "done")}
    parts = [call for call in server.seen if call.endswith("/advance")]
    of_the_scan = [number for number, call in enumerate(parts) if call == parts[0]]
    assert len(of_the_scan) == 16
    between = of_the_scan[-1] - of_the_scan[0] + 1 - len(of_the_scan)
    assert between >= 8
    server.hold()
    await api.post("/v1/scans", SWEEP)
    await asyncio.to_thread(server.holding.wait, 10)
    await schedule._scan_by_clock("fingerprint")
    server.release()
    await api.sidecar.runner.idle()
    metrics = await api.metrics()
    assert metrics['flipwatch_sweeps_skipped_total{reason="running"}'] == 1
    assert metrics['flipwatch_scans_skipped_total{reason="running"}'] == 0


async def test_a_mitigation_ends_a_scan_and_a_sweep_beside_it(start: Start, server: FakeServer) -> None:
    """Both give way before the model changes under them, and nothing of them stays on the probe."""
    api = await start()
    server.hold()
    await api.post("/v1/scans", {})
    await asyncio.to_thread(server.holding.wait, 10)
    assert (await api.post("/v1/scans", SWEEP)).status_code == 202
    loss = asyncio.create_task(api.sidecar.runner.alone(api.sidecar.scans.loss))
    await asyncio.sleep(0)
    server.release()
    assert await loss is not None
    assert {scan["state"] for scan in (await api.get("/v1/scans")).json()} == {"failed"}
    assert server.measurements == 0


async def test_each_monitor_has_its_own_clock_for_what_is_old(start: Start) -> None:
    """A sweep of twenty minutes ago is old at five minutes, a scan is not at sixty."""
    api = await start(scan={"every_minutes": 60}, fingerprint={"every_minutes": 5})
    await api.sidecar.schedule.met()
    live = api.sidecar.live
    ended = live.tally("fingerprint").last_at
    live.now = lambda: ended + 20 * 60
    healths = {state["monitor"]: state["health"] for state in (await api.get("/v1/states")).json()["states"]}
    assert healths == {"alpha_scan": "ok", "fingerprint": "unknown"}
    assert (await _state(api))["reason"] == "The last finding is 20 minutes old, though a scan is due every 5."


# New baselines


async def test_an_announced_change_is_recorded_with_its_reason(start: Start, server: FakeServer) -> None:
    """The changed bytes become the baseline; who said so and why is in the audit log."""
    api = await start()
    server.weights.damage(7, 4)
    server.weights.damage(9, 5)
    assert (await _swept(api))["finding"]["health"] == "failed"
    scan = await _recorded(api, "LoRA merged")
    assert (scan["trigger"], scan["monitor"], scan["finding"]["health"]) == ("baseline", "fingerprint", "ok")
    assert scan["steps_done"] == scan["steps_total"] == 80
    [asked] = await _events(api, "fingerprint asked for")
    assert (asked["actor"], asked["detail"]) == ("boss", {"scan_id": scan["id"], "reason": "LoRA merged"})
    [recorded] = await _events(api, "fingerprint recorded")
    assert (recorded["actor"], recorded["detail"]) == ("boss", {"reason": "LoRA merged", "changed_chunks": 2})
    seal = (await api.get("/v1/integrity")).json()["ranks"][0]
    assert seal["recorded_at"] == 1100.0
    stamp = 'flipwatch_weights_baseline_timestamp_seconds{model_name="toy-model",rank="0"}'
    assert (await api.metrics())[stamp] == 1100.0


async def test_a_new_baseline_keeps_a_bad_check_and_drops_a_good_one(start: Start, server: FakeServer) -> None:
    """Recording does not make wrong bytes good; and a comparison of other bytes proves nothing about new ones."""
    api = await start()
    await _checked(api)
    assert (await _recorded(api))["finding"]["health"] == "ok"
    assert (await api.get("/v1/integrity")).json()["verified"] is True
    server.weights.damage(7, 4)
    await _recorded(api)
    assert (await api.get("/v1/integrity")).json()["verified"] is None
    server.integrity.different = ["2 of 9 values of lm_head.weight differ."]
    await _checked(api)
    server.weights.damage(7, 4)
    finding = (await _recorded(api))["finding"]
    assert (finding["health"], finding["bad_chunks"]) == ("failed", 0)
    assert "lm_head.weight" in finding["reason"]


@pytest.mark.parametrize(
    "body", [{}, {"reason": ""}, {"reason": "x" * 501}, {"reason": 3}, {"reason": "x", "y": 1}, None]
)
async def test_a_new_baseline_without_a_reason_is_422(start: Start, server: FakeServer, body: object) -> None:
    """Nothing is recorded without a word for the audit log."""
    api = await start()
    assert (await api.post("/v1/integrity", body, who="boss")).status_code == 422
    assert "POST /measurements" not in server.seen


_WRONG = "model.layers.4.mlp.up_proj.weight"


async def _corrected(api: Any, *tensors: str) -> dict[str, Any]:
    """A baseline that was wrong."""
    body = {"tensors": list(tensors), "reason": "bad shard"}
    return await _ended(api, await api.post("/v1/integrity/corrections", body, who="boss"))


async def test_a_wrong_baseline_is_corrected_and_the_weights_repaired(start: Start, server: FakeServer) -> None:
    """The correction writes nothing: the sweep behind it finds the chunk, and the repair that exists puts it right."""
    api = await start()
    server.integrity.wrong = {_WRONG: (7, 4)}
    assert (await _swept(api))["finding"]["health"] == "ok"
    finding = (await _corrected(api, _WRONG))["finding"]
    assert (finding["health"], finding["bad_chunks"], finding["action"]) == ("failed", 1, "repair")
    assert server.weights.repaired == set()
    [asked] = await _events(api, "correction asked for")
    assert (asked["actor"], asked["detail"]["tensors"], asked["detail"]["reason"]) == ("boss", [_WRONG], "bad shard")
    [done] = await _events(api, "fingerprint corrected")
    assert done["detail"] == {"reason": "bad shard", "corrected": [_WRONG], "refused": []}
    accepted = await api.post("/v1/mitigations", {"action": "repair"})
    assert accepted.status_code == 202
    await api.sidecar.mitigator.settled()
    assert server.weights.repaired == {4}


async def test_a_correction_that_fails_is_no_good_news(start: Start, server: FakeServer) -> None:
    """What the checkpoint has no value for ends the scan as unknown, with the reason; the rest stays corrected."""
    api = await start()
    server.integrity.wrong = {_WRONG: (7, 4)}
    scan = await _corrected(api, _WRONG, "lost.weight")
    assert (scan["state"], scan["finding"]["health"]) == ("failed", "unknown")
    assert scan["error"] == "1 of 2 were corrected: lost.weight: The checkpoint has no such tensor."
    assert (await _swept(api))["finding"]["bad_chunks"] == 1


@pytest.mark.parametrize(
    "body",
    [
        {"tensors": [], "reason": "x"},
        {"tensors": ["a"]},
        {"tensors": ["a", "a"], "reason": "x"},
        {"tensors": ["a"], "reason": ""},
        {"tensors": "a", "reason": "x"},
    ],
)
async def test_a_wrong_correction_is_422(start: Start, server: FakeServer, body: object) -> None:
    """No tensor, no reason, a tensor twice: nothing is asked of the probe."""
    api = await start()
    assert (await api.post("/v1/integrity/corrections", body, who="boss")).status_code == 422
    assert (await api.post("/v1/integrity/corrections", {"tensors": ["a"], "reason": "x"})).status_code == 403
    assert "POST /measurements" not in server.seen


async def test_the_page_tells_of_the_weights(start: Start, server: FakeServer) -> None:
    """The fingerprint's verdict with its sentence, its alert, and whose each of the last scans was."""
    api = await start(mitigation={"mode": "observe"})
    server.weights.damage(7, 4)
    finding = (await _swept(api))["finding"]
    page = (await api.get("/", who=None)).text
    assert '<section class="verdict failed"><strong>Corrupted</strong> <span class="soft">fingerprint, scan of' in page
    assert finding["reason"] in page
    assert f"<td>{WEIGHTS_CHANGED}</td>" in page
    assert "<td>fingerprint</td><td>request</td><td>done</td>" in page


async def test_who_may_do_what(start: Start) -> None:
    """Reading is for readers, checking for operators, a new baseline for admins."""
    api = await start()
    assert (await api.get("/v1/integrity", who="reader")).status_code == 200
    assert (await api.post("/v1/integrity/checkpoint", {}, who="reader")).status_code == 403
    assert (await api.post("/v1/integrity", {"reason": "x"}, who="operator")).status_code == 403
    assert (await api.post("/v1/scans", SWEEP | {"grid": "quick"})).status_code == 422


async def test_an_absent_vllm_is_503(start: Start, server: FakeServer) -> None:
    """Nothing is claimed about bytes that cannot be asked for."""
    api = await start()
    server.stop()
    for answer in (
        await api.get("/v1/integrity"),
        await api.post("/v1/integrity", {"reason": "x"}, who="boss"),
        await api.post("/v1/integrity/checkpoint", {}),
    ):
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:flipwatch:problem:vllm-away")
    server.start()


# The checkpoint


async def test_a_check_without_a_manifest_shows_the_digests(start: Start, server: FakeServer) -> None:
    """Memory is compared, the files are read and held against nothing, and that is said."""
    api = await start()
    scan = await _checked(api)
    assert (scan["finding"]["health"], scan["trigger"]) == ("ok", "request")
    assert "12 tensors were those of the checkpoint" in scan["finding"]["reason"]
    shown = (await api.get("/v1/integrity")).json()
    assert shown["verified"] is True
    assert "1 file (1.0 kB) not checked against anything; 12 tensors in memory as in the checkpoint" in shown["summary"]
    assert [file["sha256"] for file in shown["verdict"]["files"]] == ["ab" * 32]
    [event] = await _events(api, "checkpoint checked")
    assert (event["actor"], event["detail"]["message"]) == ("operator", shown["summary"])


async def test_a_wrong_file_is_failed_until_the_next_check(start: Start, server: FakeServer, tmp_path: Path) -> None:
    """A baseline of a file that is not the publisher's must not read as ok, however clean the sweeps are."""
    manifest = tmp_path / "SHA256SUMS"
    manifest.write_text(f"{'cd' * 32}  model.safetensors\n")
    api = await start(fingerprint={"manifest": str(manifest)})
    await _checked(api)
    for scan in (await _swept(api), await _swept(api)):
        assert (scan["finding"]["health"], scan["finding"]["action"]) == ("failed", "investigate")
        assert f"model.safetensors has the SHA-256 {'ab' * 32}" in scan["finding"]["reason"]
    assert [alert.name for alert in api.sidecar.alerts.firing] == [VERDICT, WEIGHTS_CHANGED]
    assert (await api.metrics())['flipwatch_checkpoint_verified{model_name="toy-model"}'] == 0
    server.integrity.files["model.safetensors"] = "cd" * 32
    assert (await _checked(api))["finding"]["health"] == "ok"
    assert f"held against {manifest}" in (await api.get("/v1/integrity")).json()["summary"]


async def test_a_bad_check_outlives_the_sidecar_as_long_as_vllm_lives(
    settings: Callable[..., Settings], server: FakeServer
) -> None:
    """A new sidecar beside the same vLLM process judges with the check of the old one; a new process starts afresh."""
    server.integrity.different = ["2 of 9 values of lm_head.weight differ."]
    async with Sidecar(settings()) as before:
        await before.runner.run(before.sweeps.check(ScanTrigger.REQUEST, "boss"))
    async with Sidecar(settings()) as after:
        await after.runner.run(after.sweeps.sweep(ScanTrigger.REQUEST))
        assert "lm_head.weight" in after.live.state("fingerprint").reason
    server.integrity.different = []
    async with Sidecar(settings()) as good:
        await good.runner.run(good.sweeps.check(ScanTrigger.REQUEST, "boss"))
        assert good.live.integrity.verdict is not None
        server.weights.damage(7, 4)
        await good.runner.run(good.sweeps.record("weight sync", "boss"))
    async with Sidecar(settings()) as changed:
        assert changed.live.integrity.verdict is None
    server.restart()
    async with Sidecar(settings()) as last:
        await last.runner.run(last.sweeps.sweep(ScanTrigger.REQUEST))
        assert last.live.state("fingerprint").health.value == "ok"


async def test_a_checkpoint_that_cannot_be_read_is_unknown(start: Start, server: FakeServer) -> None:
    """The folder is gone, or a file is refused: the scan fails with the probe's sentence, and nothing is verified."""
    api = await start()
    server.integrity.checkpoint_refusal = "The folder /models/toy is gone."
    assert (await _checked(api))["error"] == "The checkpoint cannot be checked: The folder /models/toy is gone."
    server.integrity.checkpoint_refusal = None
    server.refuse["POST /checkpoint/digests"] = (502, "Input/output error.")
    scan = await _checked(api)
    assert scan["finding"]["health"] == "unknown"
    assert "Input/output error." in scan["error"]
    assert (await api.get("/v1/integrity")).json()["verified"] is None
