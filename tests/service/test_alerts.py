"""Alerts: when they fire and resolve, what they say, and that a bad webhook receiver hurts nobody."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from structlog.testing import capture_logs

from flipwatch.monitors.finding import Health
from flipwatch.service.alert import BLOCK_FLAGGED, DRIFTED, NOT_FINITE, UNKNOWN, WEIGHTS_CHANGED
from flipwatch.service.alerts import Alerts
from flipwatch.service.records import FindingRecord, ScanTrigger
from flipwatch.service.settings import Settings
from flipwatch.service.sidecar import Sidecar
from flipwatch.service.webhook import Webhook

from .fake_server import FakeServer

BOOT = "boot-1"


class Numbered:
    """Findings one minute apart, as the store holds them."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, *blocks: int, health: Health | None = None, loss: float | None = 3.9) -> FindingRecord:
        """The next finding: flags these blocks, healthy when there are none."""
        self._count += 1
        bad = bool(blocks) or loss is None
        health = health or (Health.FAILED if bad else Health.OK)
        body = {
            "monitor": "alpha_scan",
            "health": health.value,
            "reason": f"finding {self._count}",
            "places": [{"block": block, "reason": f"block {block}: skip gain 3.0 nats"} for block in blocks],
            "base_loss_nats": loss,
        }
        return FindingRecord(
            id=f"f{self._count}",
            scan_id="s",
            monitor="alpha_scan",
            created_at=60.0 * self._count,
            health=health,
            body=body,
            boot_id=BOOT,
        )

    def unknown(self) -> FindingRecord:
        """A finding that says nothing."""
        return self(health=Health.UNKNOWN, loss=None)


@pytest.fixture
def finding() -> Numbered:
    """Makes findings."""
    return Numbered()


class Sent(list[dict[str, Any]]):
    """Webhook bodies that were handed out."""

    def brief(self) -> list[tuple[str, str, list[str | None]]]:
        """Status, alert name and blocks of each body."""
        return [
            (body["status"], body["groupLabels"]["alertname"], [a["labels"].get("block") for a in body["alerts"]])
            for body in self
        ]


def alerts_of(sent: Sent, k: int = 2, n: int = 3) -> Alerts:
    """Alerts whose bodies go to `sent`."""
    return Alerts(k=k, n=n, send=sent.append)


def test_block_flagged_needs_k_of_n_and_resolves_below(finding: Numbered) -> None:
    """The second flag of three fires once; the alert ends when fewer than two of three findings flag the block."""
    sent = Sent()
    alerts = alerts_of(sent)
    firing = []
    for record in (finding(4), finding(), finding(4), finding(4), finding(), finding()):
        alerts.observe(record, "tiny")
        firing.append(len(alerts.firing))
    assert firing == [0, 0, 1, 1, 1, 0]
    assert sent.brief() == [("firing", BLOCK_FLAGGED, ["4"]), ("resolved", BLOCK_FLAGGED, ["4"])]


def test_drift_needs_k_of_n_and_is_no_other_alert(finding: Numbered) -> None:
    """Failed findings that name no block and have a finite loss fire together as one alert without a block."""
    sent = Sent()
    alerts = alerts_of(sent)
    for record in (finding(health=Health.FAILED), finding(4), finding(loss=None), finding(health=Health.FAILED)):
        alerts.observe(record, "tiny")
        assert DRIFTED not in {alert.name for alert in alerts.firing}
    alerts.observe(finding(health=Health.FAILED), "tiny")
    [alert] = alerts.firing
    assert (alert.name, alert.block) == (DRIFTED, None)
    assert alert.description == "2 of the last 3 findings; finding 5"
    for _ in range(2):
        alerts.observe(finding(), "tiny")
    assert sent.brief()[-1] == ("resolved", DRIFTED, [None])


def test_alert_is_said_in_alertmanagers_words(finding: Numbered) -> None:
    """The webhook body has the fields, labels, annotations and times of Alertmanager's version 4."""
    sent = Sent()
    alerts = alerts_of(sent, k=1, n=1)
    alerts.observe(finding(4), "tiny")
    alerts.observe(finding(), "tiny")
    firing, resolved = sent
    labels = {
        "alertname": BLOCK_FLAGGED,
        "model_name": "tiny",
        "severity": "critical",
        "monitor": "alpha_scan",
        "block": "4",
    }
    annotations = {
        "summary": "Block 4 does harm (tiny)",
        "description": "Flagged in 1 of the last 1 findings; block 4: skip gain 3.0 nats.",
    }
    assert firing == {
        "version": "4",
        "groupKey": '{}:{alertname="FlipwatchBlockFlagged", model_name="tiny"}',
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "flipwatch",
        "groupLabels": {"alertname": BLOCK_FLAGGED, "model_name": "tiny"},
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": "",
        "alerts": [
            {
                "status": "firing",
                "labels": labels,
                "annotations": annotations,
                "startsAt": "1970-01-01T00:01:00.000Z",
                "endsAt": "0001-01-01T00:00:00Z",
                "generatorURL": "",
                "fingerprint": firing["alerts"][0]["fingerprint"],
            }
        ],
    }
    [ended] = resolved["alerts"]
    assert (resolved["status"], ended["status"]) == ("resolved", "resolved")
    assert (ended["startsAt"], ended["endsAt"]) == ("1970-01-01T00:01:00.000Z", "1970-01-01T00:02:00.000Z")
    assert ended["fingerprint"] == firing["alerts"][0]["fingerprint"]
    assert "NaN" not in json.dumps(sent, allow_nan=False)


def test_each_block_is_an_alert_of_its_own(finding: Numbered) -> None:
    """A second block fires later by itself, and common labels leave the block out when there are two."""
    sent = Sent()
    alerts = alerts_of(sent)
    for record in (finding(4, 9), finding(4, 9), finding(2, 4, 9), finding(2)):
        alerts.observe(record, "tiny")
    assert sent.brief() == [("firing", BLOCK_FLAGGED, ["4", "9"]), ("firing", BLOCK_FLAGGED, ["2"])]
    assert "block" not in sent[0]["commonLabels"]
    assert [alert.block for alert in alerts.firing] == [2, 4, 9]
    assert alerts.confirmed_blocks(BOOT) == {2, 4, 9}
    assert alerts.confirmed_blocks("boot-2") == frozenset()


def test_wandering_flag_fires_but_confirms_no_block(finding: Numbered) -> None:
    """Two findings that flag different blocks page, but no block is confirmed for an automatic action."""
    sent = Sent()
    alerts = alerts_of(sent)
    alerts.observe(finding(3), "tiny")
    alerts.observe(finding(7), "tiny")
    assert sent.brief() == [("firing", BLOCK_FLAGGED, ["3", "7"])]
    assert alerts.confirmed_blocks(BOOT) == frozenset()


def test_model_that_is_not_finite_fires_at_once(finding: Numbered) -> None:
    """One finding without a finite loss is enough, and one with a finite loss ends it."""
    sent = Sent()
    alerts = alerts_of(sent)
    alerts.observe(finding(loss=None), "tiny")
    alerts.observe(finding(), "tiny")
    assert sent.brief() == [("firing", NOT_FINITE, [None]), ("resolved", NOT_FINITE, [None])]


def test_unknown_neither_resolves_nor_heals(finding: Numbered) -> None:
    """Findings that say nothing leave the other alerts as they are, and raise their own after k of n."""
    sent = Sent()
    alerts = alerts_of(sent)
    for record in (finding(4, loss=None), finding(4, loss=None), *(finding.unknown() for _ in range(5))):
        alerts.observe(record, "tiny")
    assert sent.brief() == [
        ("firing", NOT_FINITE, [None]),
        ("firing", BLOCK_FLAGGED, ["4"]),
        ("firing", UNKNOWN, [None]),
    ]
    for _ in range(2):
        alerts.observe(finding(), "tiny")
    assert alerts.firing == []


def test_unknown_only_is_not_called_not_finite(finding: Numbered) -> None:
    """A finding without data has no loss either, which is not the same as a loss that is not finite."""
    sent = Sent()
    alerts = alerts_of(sent)
    alerts.observe(finding.unknown(), "tiny")
    assert sent == []


def _sweep(
    number: int, health: Health, *, bad: int = 0, monitor: str = "fingerprint", swept: bool = True
) -> FindingRecord:
    """A finding of the fingerprint; one that was not `swept` says nothing about chunks."""
    body: dict[str, Any] = {"monitor": monitor, "health": health.value, "reason": f"sweep {number}", "places": []}
    if swept:
        body["bad_chunks"] = bad
    return FindingRecord(
        id=f"s{number}", scan_id="s", monitor=monitor, created_at=60.0 * number + 1, health=health, body=body
    )


def test_changed_weights_fire_at_once_and_end_with_a_clean_sweep(finding: Numbered) -> None:
    """No k of n for a digest; what could not look does not end it, what looked does, also where bytes are uncovered."""
    sent = Sent()
    alerts = alerts_of(sent)
    alerts.observe(_sweep(1, Health.FAILED, bad=2), "tiny")
    [alert] = alerts.firing
    assert (alert.name, alert.monitor, alert.block) == (WEIGHTS_CHANGED, "fingerprint", None)
    assert alert.description == "sweep 1"
    alerts.observe(_sweep(2, Health.UNKNOWN, swept=False), "tiny")
    alerts.observe(finding(), "tiny")
    assert [alert.name for alert in alerts.firing] == [WEIGHTS_CHANGED]
    alerts.observe(_sweep(3, Health.UNKNOWN), "tiny")
    assert WEIGHTS_CHANGED not in {alert.name for alert in alerts.firing}
    assert sent.brief()[0] == ("firing", WEIGHTS_CHANGED, [None])
    assert sent[0]["commonLabels"]["severity"] == "critical"
    assert ("resolved", WEIGHTS_CHANGED, [None]) in sent.brief()


def test_weights_that_were_loaded_damaged_are_alerted_on(finding: Numbered) -> None:
    """A failed sweep without a changed chunk is no silence: the summary says which of the two it is."""
    alerts = alerts_of(Sent())
    alerts.observe(_sweep(1, Health.FAILED), "tiny")
    assert [(alert.name, alert.summary) for alert in alerts.firing] == [(WEIGHTS_CHANGED, "The weights are bad")]


def test_findings_of_two_monitors_are_counted_apart(finding: Numbered) -> None:
    """Sweeps in between neither push scans out of the window nor count as drift; unknown ones are one alert each."""
    sent = Sent()
    alerts = alerts_of(sent)
    alerts.observe(finding(4), "tiny")
    for number in range(5):
        alerts.observe(_sweep(number, Health.FAILED, bad=1), "tiny")
    assert DRIFTED not in {alert.name for alert in alerts.firing}
    alerts.observe(finding(4), "tiny")
    assert alerts.confirmed_blocks(BOOT) == {4}
    for _ in range(2):
        alerts.observe(finding.unknown(), "tiny")
    for number in (6, 7):
        alerts.observe(_sweep(number, Health.UNKNOWN, swept=False), "tiny")
    unknown = [alert for alert in alerts.firing if alert.name == UNKNOWN]
    assert [alert.monitor for alert in unknown] == ["alpha_scan", "fingerprint"]
    assert unknown[1].description == "2 of the last 3 findings of fingerprint; sweep 7"
    labels = [body["alerts"][0]["labels"] for body in sent if body["groupLabels"]["alertname"] == UNKNOWN]
    assert [label["monitor"] for label in labels] == ["alpha_scan", "fingerprint"]


def test_state_survives_a_restart_silently(finding: Numbered) -> None:
    """After a restart the same alerts fire since the same time, nothing is sent again, and they can resolve."""
    records = [finding(4), finding(4), finding.unknown()]
    before = alerts_of(Sent())
    for record in records:
        before.observe(record, "tiny")
    sent = Sent()
    alerts = alerts_of(sent)
    alerts.restore(records)
    assert alerts.firing == before.firing != []
    assert sent == []
    alerts.observe(finding(), "tiny")
    alerts.observe(finding(), "tiny")
    assert sent.brief() == [("resolved", BLOCK_FLAGGED, ["4"])]


def test_each_change_is_one_log_line(finding: Numbered) -> None:
    """Firing and resolving are one line each, also without a webhook."""
    alerts = Alerts(k=1, n=1)
    with capture_logs() as lines:
        for record in (finding(4), finding(4), finding(), finding()):
            alerts.observe(record, "tiny")
    assert [(line["event"], line["log_level"], line["alert"], line["blocks"]) for line in lines] == [
        ("alert firing", "warning", BLOCK_FLAGGED, [4]),
        ("alert resolved", "info", BLOCK_FLAGGED, [4]),
    ]


async def test_alert_outlives_a_restart_behind_unknown_findings(
    settings: Callable[..., Settings], server: FakeServer
) -> None:
    """However many unknown findings came last, a sidecar that starts again fires what the old one fired."""
    server.harm[4] = 5.0
    async with Sidecar(settings()) as before:
        for _ in range(2):
            await before.runner.run(before.scans.job(ScanTrigger.REQUEST))
        server.refuse["POST /measurements"] = (502, "Rank 1 failed.")
        for _ in range(5):
            await before.runner.run(before.scans.job(ScanTrigger.REQUEST))
    assert [alert.name for alert in before.alerts.firing] == [BLOCK_FLAGGED, UNKNOWN]
    async with Sidecar(settings()) as after:
        assert [(alert.name, alert.block) for alert in after.alerts.firing] == [(BLOCK_FLAGGED, 4), (UNKNOWN, None)]


class Receiver(ThreadingHTTPServer):
    """A real HTTP server that answers with the prepared statuses, then with 200, and keeps the bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses: list[int] = []
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}/secret-path"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A running receiver."""
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Pauses(list[float]):
    """A sleep that does not sleep and keeps the seconds."""

    async def __call__(self, seconds: float) -> None:
        """Return at once."""
        self.append(seconds)


async def test_webhook_delivers_an_alert(receiver: Receiver, finding: Numbered) -> None:
    """An alert reaches a real receiver as JSON."""
    async with Webhook(receiver.url) as webhook:
        alerts = Alerts(k=1, n=1, send=webhook.send)
        alerts.observe(finding(4), "tiny")
        alerts.observe(finding(), "tiny")
        await webhook.drained()
    assert Sent(receiver.bodies).brief() == [("firing", BLOCK_FLAGGED, ["4"]), ("resolved", BLOCK_FLAGGED, ["4"])]
    assert (webhook.sent, webhook.failures) == (2, 0)


async def test_webhook_tries_again_with_pauses(receiver: Receiver) -> None:
    """503 and 429 are tried again, after the pauses, until it works."""
    receiver.statuses = [503, 429]
    pauses = Pauses()
    async with Webhook(receiver.url, pauses=(1.0, 5.0), sleep=pauses) as webhook:
        webhook.send({"n": 1})
        await webhook.drained()
    assert pauses == [1.0, 5.0]
    assert len(receiver.bodies) == 3
    assert (webhook.sent, webhook.failures) == (1, 0)


async def test_webhook_gives_up_and_goes_on(receiver: Receiver) -> None:
    """After the last pause a body is given up and counted, at once for a 400, and the next one goes out."""
    receiver.statuses = [500, 500, 400]
    async with Webhook(receiver.url, pauses=(1.0,), sleep=Pauses()) as webhook:
        for number in range(3):
            webhook.send({"n": number})
        await webhook.drained()
    assert [body["n"] for body in receiver.bodies] == [0, 0, 1, 2]
    assert (webhook.sent, webhook.failures) == (1, 2)


async def test_webhook_survives_a_body_that_cannot_be_sent(receiver: Receiver) -> None:
    """An exception that is not httpx's costs one body, and not the worker."""
    with capture_logs() as lines:
        async with Webhook(receiver.url) as webhook:
            webhook.send({"n": {1, 2}})
            webhook.send({"n": 2})
            async with asyncio.timeout(10):
                await webhook.drained()
    assert receiver.bodies == [{"n": 2}]
    assert (webhook.sent, webhook.failures) == (1, 1)
    assert [line["why"] for line in lines] == ["TypeError"]


async def test_webhook_that_hangs_blocks_nobody_and_keeps_its_secret(finding: Numbered) -> None:
    """A receiver that accepts and never answers costs a failure, not a scan, and the URL is in no log line."""
    with socket.create_server(("127.0.0.1", 0)) as server, capture_logs() as lines:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/secret-path"
        async with Webhook(url, timeout=0.05, pauses=(1.0,), sleep=Pauses()) as webhook:
            alerts = Alerts(k=1, n=1, send=webhook.send)
            alerts.observe(finding(4), "tiny")
            assert [alert.name for alert in alerts.firing] == [BLOCK_FLAGGED]
            await webhook.drained()
    assert (webhook.sent, webhook.failures) == (0, 1)
    assert [line["why"] for line in lines if "webhook" in line["event"]] == ["no answer within 0.05 s"] * 2
    assert "secret" not in str(lines)


async def test_webhook_nobody_listens() -> None:
    """A refused connection is a counted failure."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
    async with Webhook(url, pauses=(), sleep=Pauses()) as webhook:
        webhook.send({})
        await webhook.drained()
    assert (webhook.sent, webhook.failures) == (0, 1)


async def test_webhook_queue_is_bounded_and_stops_at_once() -> None:
    """Bodies beyond the queue and those that still wait at the end are counted as failures."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        async with Webhook(url, timeout=60.0) as webhook:
            for _ in range(105):
                webhook.send({})
            await asyncio.sleep(0)
    assert (webhook.sent, webhook.failures) == (0, 105)
