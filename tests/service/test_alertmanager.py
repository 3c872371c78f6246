"""The webhook receiver for Alertmanager: what a notification orders, what it does not, and which answer says so."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flipwatch.monitors.canary.pulse import Beat, Pulse
from flipwatch.service.heart import Heart

from .fake_server import FakeServer

Start = Callable[..., Any]

FIRING = "/v1/alertmanager/"


def _notification(*alerts: dict[str, Any], status: str = "firing", **more: Any) -> dict[str, Any]:
    """As Alertmanager 0.25 sends it."""
    entries = [
        {
            "status": alert.pop("status", status),
            "labels": {"severity": "critical", "instance": "10.0.0.1:9477"} | alert,
            "annotations": {"summary": "A summary.", "description": "A description."},
            "startsAt": "2026-11-30T12:00:00.000Z",
            "endsAt": "0001-01-01T00:00:00Z",
            "generatorURL": "http://prometheus/graph",
            "fingerprint": "0123456789abcdef",
        }
        for alert in alerts
    ]
    return {
        "receiver": "flipwatch-repair",
        "status": status,
        "alerts": entries,
        "groupLabels": {},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "http://alertmanager",
        "version": "4",
        "groupKey": "{}:{}",
        "truncatedAlerts": 0,
        **more,
    }


def _verdict(verdict: str = "weight_fault", **more: str) -> dict[str, Any]:
    return {"alertname": "FlipwatchVerdict", "verdict": verdict, **more}


async def _told(api: Any, action: str, *alerts: dict[str, Any], status: int, who: str = "operator", **more: Any) -> str:
    """The outcome of a notification, or the sentence of the problem that answers it."""
    response = await api.post(FIRING + action, _notification(*alerts, **more), who=who)
    assert response.status_code == status, response.text
    body = response.json()
    return str(body["outcome"] if status < 400 else body["detail"])


async def _settled(api: Any) -> list[dict[str, Any]]:
    """All mitigations, newest first, once those that were ordered have ended and were verified."""
    await api.sidecar.mitigator.settled()
    await asyncio.gather(*api.sidecar._followers)
    records: list[dict[str, Any]] = (await api.get("/v1/mitigations")).json()
    return records


async def test_a_firing_alert_repairs_once(start: Start, server: FakeServer) -> None:
    """The order is on record with the alert as its reason; repeated, it finds nothing changed and orders nothing."""
    server.harm[4] = 5.0
    server.weights.damage(7, 4)
    api = await start()
    alerts = [_verdict(), {"alertname": "FlipwatchWeightsChanged"}, _verdict(status="resolved", verdict="hung")]
    response = await api.post(FIRING + "repair", _notification(*alerts))
    assert response.status_code == 202
    assert response.json()["outcome"].startswith("Will put ")
    [record] = await _settled(api)
    assert response.headers["location"] == f"/v1/mitigations/{record['id']}"
    assert response.json()["mitigation_id"] == record["id"]
    assert (record["state"], record["actor"], record["blocks"]) == ("repaired", "operator", [4])
    assert (record["automatic"], record["rule"]) == (False, None)
    assert record["reason"] == "Alertmanager: FlipwatchVerdict (weight_fault), FlipwatchWeightsChanged"
    assert not server.weights.bad
    assert await _told(api, "repair", _verdict(), status=200) == (
        "Nothing to repair: all 40 chunks are those of the baseline."
    )
    assert len(await _settled(api)) == 1
    [event, *_] = (await api.get("/v1/events")).json()
    assert (event["actor"], event["what"]) == ("operator", "alert received, nothing ordered")
    assert event["detail"] == {
        "action": "repair",
        "reason": "Alertmanager: FlipwatchVerdict (weight_fault)",
        "message": "Nothing to repair: all 40 chunks are those of the baseline.",
    }


async def test_a_repair_that_failed_rests(start: Start, server: FakeServer) -> None:
    """Alerts come again and again: the same repair would fail again and keep scans from their end."""
    server.weights.damage(7, 4, parity="Two of one group.", checkpoint="The file is gone.")
    api = await start()
    await _told(api, "repair", _verdict(), status=202)
    [record] = await _settled(api)
    assert record["state"] == "failed"
    told = await _told(api, "repair", _verdict(), status=409)
    assert told == (
        f"Mitigation {record['id']}, a repair, failed 0.0 minutes ago: an alert orders no other one for 10 minutes."
    )
    server.restart()
    await api.sidecar.schedule.look()
    server.weights.damage(7, 4)
    await _told(api, "repair", _verdict(), status=202)
    assert len(await _settled(api)) == 2


async def test_the_skip_is_of_the_block_that_the_scan_flags(start: Start, server: FakeServer) -> None:
    """Not of the one that the alert names, and not twice, neither before nor after the scan that follows."""
    server.harm[4] = 5.0
    api = await start()
    await api.scanned()
    alert = {"alertname": "FlipwatchBlockFlagged", "block": "2"}
    assert (await _told(api, "skip", alert, status=202)).startswith("Will set the gate of block 4 to 0")
    await api.sidecar.mitigator.settled()
    assert await _told(api, "skip", alert, status=200) == "Block 4 mitigated already: nothing more is ordered."
    [record] = await _settled(api)
    assert (record["state"], record["blocks"]) == ("active", [4])
    assert record["reason"] == "Alertmanager: FlipwatchBlockFlagged (block 2)"
    assert [block for block, gate in enumerate(server.gates) if gate == 0.0] == [4]
    assert "flags no block" in await _told(api, "skip", alert, status=200)
    assert len(await _settled(api)) == 1


async def test_a_skip_that_does_not_help_is_taken_back_and_stays_so(start: Start, server: FakeServer) -> None:
    """No person asked for it; the alert that goes on firing does not begin it anew."""
    server.harm[4] = 5.0
    api = await start()
    await api.scanned()
    # The block is whole again behind the scan's back.
    server.harm[4] = 0.0
    await _told(api, "skip", _verdict(), status=202)
    await api.sidecar.mitigator.settled()
    [record] = await _settled(api)
    assert (record["state"], record["undone_by"], record["automatic"]) == ("reverted", "flipwatch", True)
    assert record["message"].startswith("Undone at once")
    assert all(gate == 1.0 for gate in server.gates)
    server.harm[4] = 5.0
    await api.scanned()
    told = await _told(api, "skip", _verdict(), status=409)
    assert told.startswith(f"flipwatch undid mitigation {record['id']}, which an alert ordered")


async def test_a_second_damaged_block_is_for_a_person(start: Start, server: FakeServer) -> None:
    """At most one skip by an alert is open; that this one is not done is an error, which Alertmanager counts."""
    server.harm[4] = 5.0
    api = await start()
    await api.scanned()
    await _told(api, "skip", _verdict("old_fault"), status=202)
    [skip] = await _settled(api)
    server.harm[6] = 5.0
    await api.scanned()
    told = await _told(api, "skip", _verdict("old_fault"), status=409)
    assert told == (
        f"Mitigation {skip['id']}, which an alert ordered, is open and holds block 4; the last scan flags block 6: "
        "more damage than that is for a person to look at."
    )
    # A person's skip is none of this route's.
    assert (await api.delete(f"/v1/mitigations/{skip['id']}")).status_code == 202
    await _settled(api)
    server.harm[4] = 0.0
    await api.scanned()
    await _told(api, "skip", _verdict("old_fault"), status=202)
    assert [record["blocks"] for record in await _settled(api) if record["state"] == "active"] == [[6]]


async def test_a_skip_without_a_scan_is_an_error(start: Start, server: FakeServer) -> None:
    """No data is not `nothing flagged`: Alertmanager is to try again, and to count it."""
    api = await start()
    told = await _told(api, "skip", _verdict(), status=409)
    assert told.startswith("No scan says which block to leave out: No scan has finished")
    await api.scanned()
    assert "flags no block" in await _told(api, "skip", _verdict(), status=200)
    assert await _settled(api) == []


async def test_a_scan_older_than_the_evidence_is_not_believed(start: Start, server: FakeServer) -> None:
    """It flags nothing because it looked before: Alertmanager is to try again, and then the new scan counts."""
    api = await start()
    await api.scanned()
    assert "flags no block" in await _told(api, "skip", _verdict(), status=200)
    server.weights.damage(7, 4)
    server.harm[4] = 5.0
    assert (await api.post("/v1/scans", {"monitor": "fingerprint"})).status_code == 202
    await api.sidecar.runner.idle()
    told = await _told(api, "skip", _verdict(), status=503)
    assert told.startswith("Whether a block stands out now is not known: ")
    assert "looked before" in told
    await api.scanned()
    await _told(api, "skip", _verdict(), status=202)
    assert [record["blocks"] for record in await _settled(api)] == [[4]]


async def test_a_drain_rests_on_this_sidecars_verdict(start: Start, server: FakeServer) -> None:
    """An alert of another replica drains nothing; with a verdict that is a reason it drains, once."""
    api = await start()
    told = await _told(api, "drain", _verdict("hung"), status=200)
    assert told.startswith("The verdict of this sidecar is unknown, which is no reason to drain: ")
    assert (await api.get("/readyz")).status_code == 200
    server.weights.damage(7, 4)
    assert (await api.post("/v1/scans", {"monitor": "fingerprint"})).status_code == 202
    await api.sidecar.runner.idle()
    assert (await _told(api, "drain", _verdict("hung"), status=202)).startswith("Drained: ")
    assert (await api.get("/readyz")).status_code == 503
    assert "drains this server already" in await _told(api, "drain", _verdict("hung"), status=200)
    [record] = await _settled(api)
    assert (record["action"], record["state"]) == ("drain", "active")


async def test_an_order_on_its_way_is_enough(start: Start, server: FakeServer) -> None:
    """Two Alertmanagers of a cluster may both send it: the second is told so.  Another action has to wait."""
    server.harm[4] = 5.0
    server.weights.damage(7, 4)
    api = await start()
    await api.scanned()
    server.hold()
    alert = _verdict()
    assert (await _told(api, "skip", alert, status=202)).startswith("Will set the gate of block 4 to 0")
    assert await _told(api, "skip", alert, status=200) == "Block 4 mitigated already: nothing more is ordered."
    assert await _told(api, "repair", alert, status=503) == (
        "Another mitigation is on its way: the repair has to wait."
    )
    server.release()
    assert [record["action"] for record in await _settled(api)] == ["skip"]
    # With a fresh sweep the order is answered at once, and the repair waits for the loss.
    assert (await api.post("/v1/scans", {"monitor": "fingerprint"})).status_code == 202
    await api.sidecar.runner.idle()
    server.hold()
    assert (await _told(api, "repair", alert, status=202)).startswith("Will put ")
    assert (await _told(api, "repair", alert, status=200)).endswith(" is on its way, and does the same.")
    server.release()
    assert [record["action"] for record in await _settled(api)] == ["repair", "skip"]


async def test_what_else_is_on_its_way_is_not_the_same(start: Start, server: FakeServer) -> None:
    """A person's skip of another block, or repair of one block, leaves undone what the alert wants: no success."""
    server.harm[4] = 5.0
    api = await start(mitigation={"max_blocks": 4})
    await api.scanned()
    server.hold()
    order = {"action": "skip", "blocks": [2], "force": True}
    assert (await api.post("/v1/mitigations", order)).status_code == 202
    assert (await _told(api, "skip", _verdict(), status=503)).endswith("the skip has to wait.")
    server.release()
    await _settled(api)
    server.weights.damage(7, 4)
    assert (await api.post("/v1/scans", {"monitor": "fingerprint"})).status_code == 202
    await api.sidecar.runner.idle()
    server.hold()
    assert (await api.post("/v1/mitigations", {"action": "repair", "blocks": [4]})).status_code == 202
    assert (await _told(api, "repair", _verdict(), status=503)).endswith("the repair has to wait.")
    server.release()
    assert [record["action"] for record in await _settled(api)] == ["repair", "skip"]


async def test_a_scan_of_before_the_repair_orders_no_skip(start: Start, server: FakeServer) -> None:
    """Repair and skip may be routed from one alert: what was put right is left in, and the next scan has the word."""
    server.harm[4] = 5.0
    server.weights.damage(7, 4)
    api = await start()
    await api.scanned()
    await _told(api, "repair", _verdict(), status=202)
    await api.sidecar.mitigator.settled()
    told = await _told(api, "skip", _verdict(), status=503)
    assert told == (
        "The model was mitigated or repaired since the last scan, and has not been measured again: nobody knows "
        "whether block 4 would be flagged now."
    )
    [repair] = await _settled(api)
    assert repair["state"] == "repaired"
    assert "flags no block" in await _told(api, "skip", _verdict(), status=200)
    assert all(gate == 1.0 for gate in server.gates)


async def test_what_a_person_undid_stands(start: Start, server: FakeServer) -> None:
    """The alert goes on firing, and the same group comes again: neither skip nor drain is done a second time by it."""
    server.harm[4] = 5.0
    api = await start(mitigation={"max_actions": 9})
    await api.scanned()
    for action, alert in (("skip", _verdict("old_fault")), ("drain", _verdict("hung"))):
        if action == "drain":
            server.weights.damage(7, 4)
            assert (await api.post("/v1/scans", {"monitor": "fingerprint"})).status_code == 202
            await api.sidecar.runner.idle()
        await _told(api, action, alert, status=202)
        [record, *_] = await _settled(api)
        assert (await api.delete(f"/v1/mitigations/{record['id']}", who="boss")).status_code == 202
        await _settled(api)
        told = await _told(api, action, alert, status=409)
        assert told == (
            f"boss undid mitigation {record['id']}, which an alert ordered: that stands for alerts until vLLM restarts."
        )
    assert [record["state"] for record in await _settled(api)] == ["reverted", "reverted"]
    order = {"action": "skip", "blocks": [4]}
    assert (await api.post("/v1/mitigations", order, who="boss")).status_code == 202
    await _settled(api)


async def test_what_a_person_undid_stands_beside_a_hung_vllm(
    start: Start, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a sidecar that was restarted meanwhile, and that has heard nothing of this vLLM itself."""
    first = await start()
    await first.scanned()
    await first.sidecar.__aexit__(None, None, None)
    server.stop()

    async def feel(heart: Heart) -> Beat:
        heart._live.beat = Beat(Pulse.HUNG, "Nothing moves.")
        return heart._live.beat

    monkeypatch.setattr(Heart, "feel", feel)
    api = await start()
    await api.sidecar.heart.feel()
    await _told(api, "drain", _verdict("hung"), status=202)
    [record] = await _settled(api)
    assert (await api.delete(f"/v1/mitigations/{record['id']}", who="boss")).status_code == 202
    assert (await _told(api, "drain", _verdict("hung"), status=409)).startswith("boss undid mitigation ")
    assert (await api.get("/readyz")).status_code == 200


async def test_resolved_orders_nothing(start: Start, server: FakeServer) -> None:
    """Neither a group that is resolved, nor one that fires for alerts that are none of Flipwatch's."""
    server.weights.damage(7, 4)
    api = await start()
    nothing = "The alerts are resolved: nothing is ordered."
    assert await _told(api, "repair", _verdict(status="resolved"), status=200, more={"grown": True}) == nothing
    body = _notification(_verdict(), status="resolved")
    assert (await api.post(FIRING + "repair", body)).json()["outcome"] == nothing
    mixed = [{"alertname": "NodeDown"}, _verdict(status="resolved")]
    assert await _told(api, "repair", *mixed, status=200) == nothing
    assert server.weights.bad
    assert await _settled(api) == []


@pytest.mark.parametrize(
    ("mitigation", "words"),
    [({"mode": "observe"}, "The mode is observe"), ({"max_actions": 1}, "mitigation.max_actions allows 1")],
)
async def test_what_the_settings_forbid_is_an_error(
    start: Start, server: FakeServer, mitigation: dict[str, Any], words: str
) -> None:
    """Who wires the webhook wants it to act: that it may not shows as a failed notification, and is not tried again."""
    server.weights.damage(7, 4)
    api = await start(mitigation=mitigation)
    if "max_actions" in mitigation:
        assert (await api.post("/v1/mitigations", {"action": "drain"})).status_code == 202
    assert words in await _told(api, "repair", _verdict(), status=403)
    assert server.weights.bad
    [event, *_] = (await api.get("/v1/events")).json()
    assert event["what"] == "alert received, refused"
    assert words in event["detail"]["message"]


async def test_dry_run_says_what_it_would_do(start: Start, server: FakeServer) -> None:
    """The way to rehearse the wiring: a record, and nothing touched."""
    server.weights.damage(7, 4)
    api = await start(mitigation={"mode": "dry-run"})
    assert (await _told(api, "repair", _verdict(), status=202)).startswith("Dry run: would put right chunk ")
    [record] = await _settled(api)
    assert (record["state"], record["reason"]) == ("dry_run", "Alertmanager: FlipwatchVerdict (weight_fault)")
    assert server.weights.bad


async def test_what_may_pass_is_tried_again(start: Start, server: FakeServer) -> None:
    """vLLM is away: 503, which Alertmanager takes for `try again`."""
    server.weights.damage(7, 4)
    api = await start()
    server.stop()
    await _told(api, "repair", _verdict(), status=503)
    await api.sidecar.schedule.look()
    await _told(api, "skip", _verdict(), status=503)
    assert await _settled(api) == []


async def test_who_may_send_what(start: Start, server: FakeServer) -> None:
    """It takes the scope `mitigate`, alerts of Flipwatch, an action that exists, and a body of version 4."""
    server.weights.damage(7, 4)
    api = await start()
    assert "reader" in await _told(api, "repair", _verdict(), status=403, who="reader")
    assert (await api.post(FIRING + "repair", _notification(_verdict()), who=None)).status_code == 401
    told = await _told(api, "repair", {"alertname": "NodeDown"}, {}, status=422)
    assert told == (
        "None of these 2 alerts has an alertname that begins with Flipwatch: route only those to this receiver."
    )
    await _told(api, "attenuate", _verdict(), status=422)
    body = _notification(_verdict())
    for wrong in ({"version": "3"}, {"version": 4}, {"status": "burning"}, {"alerts": None}, {"alerts": [{}]}):
        assert (await api.post(FIRING + "repair", body | wrong)).status_code == 422, wrong
    labels = {"alertname": "FlipwatchVerdict", "block": 4}
    body["alerts"][0]["labels"] = labels
    assert (await api.post(FIRING + "repair", body)).status_code == 422
    assert server.weights.bad


async def test_many_alerts_make_a_reason_that_ends(start: Start, server: FakeServer) -> None:
    """A group may hold any number of alerts."""
    server.weights.damage(7, 4)
    api = await start()
    alerts = [{"alertname": "FlipwatchBlockFlagged", "block": str(block)} for block in range(80)]
    await _told(api, "repair", *alerts, status=202)
    [record] = await _settled(api)
    assert len(record["reason"]) == 500
    assert record["reason"].startswith("Alertmanager: FlipwatchBlockFlagged (block 0), FlipwatchBlockFlagged (block 1)")
    assert record["reason"].endswith("...")
