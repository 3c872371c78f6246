"""What leaving blocks out costs, and that nobody does it by mistake."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flipwatch.monitors.alpha_scan import AlphaScanFinding, BlockScore, Thresholds
from flipwatch.monitors.finding import Finding, Health, Place
from flipwatch.monitors.verdict.verdict import Joined, Verdict
from flipwatch.service.guard import harm
from flipwatch.service.live import MonitorState
from flipwatch.service.skippability import Prediction, loss_without, predicted

from .fake_server import FakeServer

Start = Callable[..., Any]

BASE = 3.79
AT = 1_800_000_000.0


def finding(**changes: Any) -> AlphaScanFinding:
    """Five blocks: 0 is dear, 1 costs 0.04, 2 costs 0.03, 3 breaks the model, 4 does harm and is flagged."""
    losses: list[float | None] = [11.5, BASE + 0.04, BASE + 0.03, None, 3.0]
    scores = [
        BlockScore(block=block, curve=((0.0, loss), (0.7, BASE + 0.1)), flagged=block == 4)
        for block, loss in enumerate(losses)
    ]
    body = {
        "monitor": "alpha_scan",
        "health": Health.FAILED,
        "reason": "Block 4 does harm.",
        "places": [Place(block=4, reason="0.79 nats")],
        "base_loss_nats": BASE,
        "predicted_loss_nats": 3.0,
        "thresholds": Thresholds(),
        "blocks": scores,
        "flagged": (4,),
        "gates": (1.0,) * 5,
    }
    return AlphaScanFinding.model_validate(body | changes)


def said(blocks: list[int], alpha: float = 0.0, gates: tuple[float, ...] = (1.0,) * 5, **changes: Any) -> str | None:
    """What the guard says to an order after such a finding."""
    state = MonitorState("alpha_scan", Health.FAILED, "", AT, finding(**changes), "id")
    return harm(state, gates, blocks, alpha, 0.05)


def test_loss_without_a_block() -> None:
    """From the curve at alpha 0; not finite and not measured are unknown."""
    assert [loss_without(finding(), block) for block in range(5)] == [11.5, BASE + 0.04, BASE + 0.03, None, 3.0]
    assert loss_without(finding(blocks=[BlockScore(block=0)], flagged=()), 0) is None
    # Scored without block 3: only what the scan measured with exactly the flagged ones left out is known.
    assert loss_without(finding(left_out=(3,), flagged=(3,), predicted_loss_nats=2.5), 3) == 2.5
    assert loss_without(finding(left_out=(3,), flagged=(3,), predicted_loss_nats=2.5), 1) is None


def test_prediction_for_several_blocks() -> None:
    """The flagged set was measured as a whole; any other set is added up; one that breaks the model breaks it."""
    both = finding(flagged=(1, 4), predicted_loss_nats=2.9)
    assert predicted(both, [4, 1], 0.0) == Prediction(2.9, estimated=False)
    known = predicted(finding(), [1, 2], 0.0)
    assert known is not None
    assert known.estimated
    assert known.nats == pytest.approx(BASE + 0.07)
    assert predicted(finding(), [1, 3], 0.0) == Prediction(None, estimated=False)
    between = predicted(finding(), [0], 0.35)
    assert between is not None
    assert between.estimated
    assert between.nats == pytest.approx((11.5 + BASE + 0.1) / 2)
    assert predicted(finding(), [1], 1.3) is None
    assert predicted(finding(), [3], 0.5) is None


def test_a_harmful_order_is_told_with_the_numbers() -> None:
    """The sentence has both losses, the scan's time, and says where it only adds up."""
    time = "2027-01-15 08:00:00 UTC"
    assert said([0]) == f"Leaving block 0 out would raise the loss from 3.79 to 11.50 nats (scan of {time})"
    assert (
        said([1], 0.7) == f"Scaling block 1 to alpha 0.7 would raise the loss from 3.79 to 3.89 nats (scan of {time})"
    )
    assert said([3]) == f"Leaving block 3 out would raise the loss from 3.79 to no finite number (scan of {time})"
    assert said([1, 2]) == (
        "Leaving blocks 1 and 2 out would raise the loss from 3.79 to about 3.86 nats "
        f"(estimated from the single changes in the scan of {time})"
    )
    assert said([0], 0.001) is not None
    # Block 4 was left out since.
    assert said([0], gates=(1.0, 1.0, 1.0, 1.0, 0.0)) == (
        "Leaving block 0 out would raise the loss from 3.79 to about 11.50 nats "
        f"(estimated from the single changes in the scan of {time})"
    )


@pytest.mark.parametrize(
    "order",
    [
        {"blocks": [4]},
        {"blocks": [1]},
        {"blocks": [1], "alpha": 0.01},
        {"blocks": [1], "alpha": 1.3},
        {"blocks": [0], "gates": (0.5, 1.0, 1.0, 1.0, 1.0)},
        {"blocks": [0], "left_out": (3,)},
        {"blocks": [0], "base_loss_nats": None},
    ],
)
def test_what_the_scan_does_not_know_or_mind_is_not_refused(order: dict[str, Any]) -> None:
    """A gain, a small loss, a block that is scaled already, blocks left out inside the scan, no finite loss."""
    assert said(**order) is None


def test_without_a_scan_nothing_is_refused() -> None:
    """No finding, a failed scan, or one of another vLLM process says nothing."""
    failed = Finding(monitor="alpha_scan", health=Health.UNKNOWN, reason="The scan failed.")
    for state in (
        None,
        MonitorState("alpha_scan", Health.UNKNOWN, ""),
        MonitorState("alpha_scan", Health.UNKNOWN, "", AT, failed),
    ):
        assert harm(state, (1.0,) * 5, [0], 0.0, 0.05) is None


async def _settled(api: Any, answer: Any) -> dict[str, Any]:
    assert answer.status_code == 202, answer.text
    await api.sidecar.mitigator.settled()
    record: dict[str, Any] = (await api.get(answer.headers["location"])).json()
    return record


async def test_a_skip_that_the_scan_calls_harmful_needs_force(start: Start, server: FakeServer) -> None:
    """Done before a scan, refused with the numbers after one, and with force done and recorded as forced."""
    api = await start()
    order = {"action": "skip", "blocks": [2]}
    first = await _settled(api, await api.post("/v1/mitigations", order))
    assert (first["state"], first["forced"]) == ("active", False)
    await _settled(api, await api.delete(f"/v1/mitigations/{first['id']}"))
    await asyncio.gather(*api.sidecar._followers)
    await api.sidecar.runner.idle()

    scan = await api.scanned()
    assert scan["finding"]["health"] == "ok", scan
    shown = (await api.get("/v1/blocks")).json()
    assert shown[2]["loss_without_nats"] == pytest.approx(server.loss(scan={2: 0.0}), abs=0.05)
    refused = await api.post("/v1/mitigations", order)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:flipwatch:problem:conflict")
    assert refused.json()["detail"].startswith("Leaving block 2 out would raise the loss from 2.0")
    assert refused.json()["detail"].endswith("not done without force.")
    assert server.gates == [1.0] * 8

    forced = await _settled(api, await api.post("/v1/mitigations", order | {"force": True}))
    assert (forced["state"], forced["forced"]) == ("active", True)
    assert server.gates[2] == 0.0
    events = {event["what"]: event for event in (await api.get("/v1/events")).json()}
    assert events["mitigation forced"]["actor"] == "operator"
    assert "Leaving block 2 out would raise the loss" in events["mitigation forced"]["detail"]["message"]
    assert (await _settled(api, await api.delete(f"/v1/mitigations/{forced['id']}")))["state"] == "reverted"


async def test_force_on_a_harmless_order_is_not_recorded_as_forced(start: Start, server: FakeServer) -> None:
    """The record says forced only where the scan was overruled."""
    api = await start()
    server.harm[4] = 5.0
    await api.scanned()
    record = await _settled(api, await api.post("/v1/mitigations", {"action": "skip", "blocks": [4], "force": True}))
    assert (record["state"], record["forced"]) == ("active", False)


async def test_an_automatic_mitigation_is_never_forced(start: Start, server: FakeServer) -> None:
    """Flipwatch itself obeys the scan too: the refusal is in the audit log, the gates stay."""
    api = await start(automation={"rules": [{"verdict": "old_fault", "action": "skip", "k": 1, "n": 1}]})
    await api.scanned()
    wrong = Joined(verdict=Verdict.OLD_FAULT, health=Health.FAILED, reason="A mistake.", blocks=(2,))
    assert await api.sidecar.automatic.consider(wrong, server.boot_id, {2}, 1.0) is None
    assert server.gates == [1.0] * 8
    event = (await api.get("/v1/events")).json()[0]
    assert event["what"] == "automation refused"
    assert "not done without force" in event["detail"]["message"]
