"""Alerts from findings: k of n before one fires, fewer than k of n before it resolves.

    FlipwatchBlockFlagged     k of the last n findings flag a block; one alert for each block that k of them flag, or,
                              when the flag wanders, for all blocks that they flag
    FlipwatchModelDrifted     k of the last n findings say that the model is damaged (its loss lies above its healthy
                              value) and name no block
    FlipwatchModelNotFinite   the last finding says that the loss of the model is not finite: fires at once
    FlipwatchWeightsChanged   the last sweep found bytes that are not those of the baseline, or a baseline that was bad:
                              fires at once, since a digest does not err
    FlipwatchBlockDeparts     k of the last n findings say that a block computes something else than its reference;
                              per block as the first one, and one without a block where the model departs and no block
                              does
    FlipwatchAnswersWrong     k of the last n findings of the canary say that the answers have a symptom
    FlipwatchVerdict          the joined verdict is a bad one: at once where it rests on changed bytes or on the
                              heartbeat, else when k of the last n findings of a monitor that it rests on are bad
    FlipwatchUnknown          k of the last n findings of a monitor are `unknown`; not of one that runs only when
                              somebody asks: who asked is told; nor of sound answers that nothing could be said of
                              because there is nothing to compare them with

The first three are about the alpha-scan, the fourth about the fingerprint, the fifth about the differential monitor;
findings of different monitors are never counted together.  An `unknown` finding says nothing about blocks or losses: it
neither fires nor resolves an alert about them.  So does a verdict that is `unknown`, unless what the alert rests on is
known to be otherwise now; another verdict ends the alert of the one before.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Literal

import structlog

from ..monitors.alpha_scan import AlphaScan
from ..monitors.canary.finding import NAME as CANARY
from ..monitors.differential.facts import NAME as DIFFERENTIAL
from ..monitors.finding import Health
from ..monitors.fingerprint.judgement import NAME as FINGERPRINT
from ..monitors.verdict.evidence import HEARTBEAT, Answer, Question
from ..monitors.verdict.verdict import Joined, Verdict
from .records import FindingRecord

BLOCK_FLAGGED = "FlipwatchBlockFlagged"
DRIFTED = "FlipwatchModelDrifted"
NOT_FINITE = "FlipwatchModelNotFinite"
WEIGHTS_CHANGED = "FlipwatchWeightsChanged"
BLOCK_DEPARTS = "FlipwatchBlockDeparts"
ANSWERS_WRONG = "FlipwatchAnswersWrong"
VERDICT = "FlipwatchVerdict"
UNKNOWN = "FlipwatchUnknown"
NAMES = (BLOCK_FLAGGED, DRIFTED, NOT_FINITE, WEIGHTS_CHANGED, BLOCK_DEPARTS, ANSWERS_WRONG, VERDICT, UNKNOWN)

ALERTING = {
    Verdict.WEIGHT_FAULT: "critical",
    Verdict.LATENT_WEIGHT_FAULT: "warning",
    Verdict.OLD_FAULT: "critical",
    Verdict.SERVING_FAULT: "critical",
    Verdict.HUNG: "critical",
}
"""Verdicts that fire FlipwatchVerdict, and the severity of that."""

_CERTAIN = frozenset({FINGERPRINT, HEARTBEAT})
"""A digest does not err, and the heartbeat has waited long enough by itself."""

_JOINED = "verdict"
"""In the place of a monitor's name."""

# What Alertmanager writes for "not ended yet".
_NO_END = "0001-01-01T00:00:00Z"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Alert:
    """One alert that fires."""

    name: str
    monitor: str
    block: int | None
    since: float
    """UTC epoch seconds of the finding that made it fire."""
    summary: str
    description: str
    verdict: Verdict | None = None
    """Of FlipwatchVerdict only."""
    rests_on: tuple[Question, ...] = ()
    """Of the same: a no to any of these ends it."""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What tells it from others; in the order in which alerts are shown."""
        return self.name, self.monitor, -1 if self.block is None else self.block, self.verdict or ""

    @property
    def severity(self) -> str:
        """As the label says it."""
        if self.verdict is not None:
            return ALERTING[self.verdict]
        return "warning" if self.name == UNKNOWN else "critical"


class Alerts:
    """The alerts of all monitors' findings.

    `send` takes an Alertmanager webhook body each time that alerts of one name start or end; it must return at once.
    `on_request` are the monitors that run only when somebody asks.
    """

    def __init__(
        self,
        *,
        k: int,
        n: int,
        send: Callable[[dict[str, Any]], None] | None = None,
        on_request: Collection[str] = (),
    ) -> None:
        self._k = k
        self._n = n
        self._send = send
        self._on_request = on_request
        self._windows: dict[str, _Window] = {}
        self._firing: dict[tuple[str, str, int, str], Alert] = {}

    @property
    def firing(self) -> list[Alert]:
        """All alerts that fire, by name, monitor and block."""
        return [self._firing[key] for key in sorted(self._firing)]

    def confirmed_blocks(self, boot_id: str) -> frozenset[int]:
        """Blocks that k of the last n alpha-scans flag, all of this vLLM process: what automation may leave out."""
        return self._window(AlphaScan.name).confirmed_blocks(boot_id)

    def restore(self, findings: Iterable[FindingRecord]) -> None:
        """Come to the state that these findings, oldest first, have led to; nothing is logged or sent again.

        Give the last n of each monitor, and its last n that are not `unknown`: each alert counts one of the two.
        """
        for finding in findings:
            self._step(finding)

    def observe(self, finding: FindingRecord, model_name: str) -> None:
        """Take in the next finding; logs and sends what starts and what ends."""
        self._tell_all(*self._step(finding), finding.created_at, model_name)

    def judge(self, joined: Joined, at: float, model_name: str) -> None:
        """Take in the verdict of now, epoch seconds; logs and sends what starts and what ends."""
        if joined.verdict is Verdict.UNKNOWN:
            wanted = [alert for alert in self._firing.values() if alert.name == VERDICT and not _refuted(alert, joined)]
        else:
            wanted = self._of_verdict(joined, at)
        self._tell_all(*self._change(_JOINED, wanted), at, model_name)

    def restore_verdict(self, joined: Joined, at: float) -> None:
        """Come to the state that this verdict led to, after `restore`; nothing is logged or sent again."""
        self._change(_JOINED, self._of_verdict(joined, at))

    def confirmed(self, monitors: Iterable[str]) -> bool:
        """Whether one of these does not err, or k of its last n findings are bad."""
        return any(monitor in _CERTAIN or self._window(monitor).confirmed for monitor in monitors)

    def _of_verdict(self, joined: Joined, at: float) -> list[Alert]:
        fires = any(alert.verdict is joined.verdict for alert in self._firing.values())
        if joined.verdict not in ALERTING or not (fires or self.confirmed(joined.grounds)):
            return []
        summary = f"The verdict on the server is {joined.verdict.value}"
        description = f"{joined.reason} {joined.advice}".strip()
        return [Alert(VERDICT, _JOINED, None, at, summary, description, joined.verdict, joined.rests_on)]

    def _tell_all(self, started: list[Alert], ended: list[Alert], at: float, model_name: str) -> None:
        for name in NAMES:
            self._tell("firing", [alert for alert in started if alert.name == name], at, model_name)
            self._tell("resolved", [alert for alert in ended if alert.name == name], at, model_name)

    def _window(self, monitor: str) -> "_Window":
        quiet = monitor in self._on_request
        return self._windows.setdefault(monitor, _Window(monitor, self._k, self._n, quiet=quiet))

    def _step(self, finding: FindingRecord) -> tuple[list[Alert], list[Alert]]:
        """Returns the alerts that start and those that end."""
        return self._change(finding.monitor, self._window(finding.monitor).take(finding))

    def _change(self, monitor: str, alerts: Iterable[Alert]) -> tuple[list[Alert], list[Alert]]:
        """From now on these are the monitor's alerts."""
        wanted = {alert.key: alert for alert in alerts}
        before = {key: alert for key, alert in self._firing.items() if alert.monitor == monitor}
        started = [alert for key, alert in wanted.items() if key not in before]
        ended = [alert for key, alert in before.items() if key not in wanted]
        others = {key: alert for key, alert in self._firing.items() if key not in before}
        self._firing = others | {key: before.get(key, alert) for key, alert in wanted.items()}
        return started, ended

    def _tell(self, status: Literal["firing", "resolved"], alerts: list[Alert], at: float, model_name: str) -> None:
        if not alerts:
            return
        blocks = [alert.block for alert in alerts if alert.block is not None]
        level = _log.warning if status == "firing" else _log.info
        level(f"alert {status}", alert=alerts[0].name, blocks=blocks, why="; ".join(a.description for a in alerts))
        if self._send is not None:
            self._send(webhook_body(status, alerts, at, model_name))


class _Window:
    """The last findings of one monitor, and the alerts that they make; a `quiet` one makes none of unknown findings."""

    def __init__(self, monitor: str, k: int, n: int, *, quiet: bool) -> None:
        self._monitor = monitor
        self._k = k
        self._quiet = quiet
        self._judged: deque[FindingRecord] = deque(maxlen=n)
        self._all: deque[FindingRecord] = deque(maxlen=n)
        self._swept: FindingRecord | None = None
        """The last that says how many chunks are bad; also one that is unknown because not all bytes are covered."""

    def confirmed_blocks(self, boot_id: str | None = None) -> frozenset[int]:
        """Blocks that k of the last n findings flag; with a boot id, only those about that vLLM process count."""
        return frozenset(block for block, count in self._counts(boot_id).items() if count >= self._k)

    @property
    def confirmed(self) -> bool:
        """k of the last n findings are bad."""
        return sum(judged.health is Health.FAILED for judged in self._judged) >= self._k

    def take(self, finding: FindingRecord) -> Iterable[Alert]:
        """The alerts that fire with this finding as the last one."""
        self._all.append(finding)
        if finding.health is not Health.UNKNOWN:
            self._judged.append(finding)
        if "bad_chunks" in finding.body:
            self._swept = finding
        yield from self._of_blocks(finding.created_at)
        if self._monitor == AlphaScan.name:
            yield from self._of_the_loss(finding.created_at)
        if self._monitor == DIFFERENTIAL:
            yield from self._of_no_block(finding.created_at)
        if self._monitor == CANARY:
            yield from self._of_answers(finding.created_at)
        if self._swept is not None and self._swept.health is Health.FAILED:
            changed = "The served weights have changed" if self._swept.body["bad_chunks"] else "The weights are bad"
            yield self._alert(WEIGHTS_CHANGED, finding.created_at, changed, str(self._swept.body["reason"]))
        unknown = [seen for seen in self._all if seen.health is Health.UNKNOWN and not seen.body.get("answered")]
        if len(unknown) >= self._k and not self._quiet:
            description = (
                f"{len(unknown)} of the last {len(self._all)} findings of {self._monitor}; {unknown[-1].body['reason']}"
            )
            summary = "Flipwatch cannot tell whether the model is healthy"
            yield self._alert(UNKNOWN, finding.created_at, summary, description)

    def _of_blocks(self, at: float) -> Iterable[Alert]:
        flagging = sum(1 for judged in self._judged if _reasons(judged))
        if flagging < self._k:
            return
        counts = self._counts()
        for block in sorted(self.confirmed_blocks() or counts):
            last = next(_reasons(judged)[block] for judged in reversed(self._judged) if block in _reasons(judged))
            description = f"Flagged in {counts[block]} of the last {len(self._judged)} findings; {last.rstrip('.')}."
            if self._monitor == DIFFERENTIAL:
                name, summary = BLOCK_DEPARTS, f"Block {block} computes something else than its reference"
            else:
                name, summary = BLOCK_FLAGGED, f"Block {block} does harm"
            yield self._alert(name, at, summary, description, block)

    def _of_the_loss(self, at: float) -> Iterable[Alert]:
        drifted = [judged for judged in self._judged if _drifted(judged)]
        if len(drifted) >= self._k:
            description = f"{len(drifted)} of the last {len(self._judged)} findings; {drifted[-1].body['reason']}"
            yield self._alert(DRIFTED, at, "The served model is damaged, and no block is the cause", description)
        if self._judged and _not_finite(self._judged[-1]):
            reason = str(self._judged[-1].body["reason"])
            yield self._alert(NOT_FINITE, at, "The loss of the served model is not finite", reason)

    def _of_no_block(self, at: float) -> Iterable[Alert]:
        """The model departs from its reference in front of the blocks or behind them."""
        failed = [judged for judged in self._judged if judged.health is Health.FAILED and not _reasons(judged)]
        if len(failed) >= self._k:
            description = f"{len(failed)} of the last {len(self._judged)} findings; {failed[-1].body['reason']}"
            summary = "The model computes something else than its reference, and no block is the cause"
            yield self._alert(BLOCK_DEPARTS, at, summary, description)

    def _of_answers(self, at: float) -> Iterable[Alert]:
        failed = [judged for judged in self._judged if judged.health is Health.FAILED]
        if len(failed) >= self._k:
            description = f"{len(failed)} of the last {len(self._judged)} findings; {failed[-1].body['reason']}"
            yield self._alert(ANSWERS_WRONG, at, "The server answers wrong, or not at all", description)

    def _alert(self, name: str, at: float, summary: str, description: str, block: int | None = None) -> Alert:
        return Alert(name, self._monitor, block, at, summary, description)

    def _counts(self, boot_id: str | None = None) -> Counter[int]:
        counted = [finding for finding in self._judged if boot_id in (None, finding.boot_id)]
        return Counter(block for finding in counted for block in _reasons(finding))


def webhook_body(
    status: Literal["firing", "resolved"], alerts: list[Alert], at: float, model_name: str
) -> dict[str, Any]:
    """Alertmanager's webhook JSON, version 4, for alerts of one name."""
    group = {"alertname": alerts[0].name, "model_name": model_name}
    common = group | {"severity": alerts[0].severity, "monitor": alerts[0].monitor}
    if alerts[0].verdict is not None:
        common["verdict"] = alerts[0].verdict.value
    entries = []
    for alert in alerts:
        labels = common if alert.block is None else common | {"block": str(alert.block)}
        entries.append(
            {
                "status": status,
                "labels": labels,
                "annotations": {"summary": f"{alert.summary} ({model_name})", "description": alert.description},
                "startsAt": _rfc3339(alert.since),
                "endsAt": _NO_END if status == "firing" else _rfc3339(at),
                "generatorURL": "",
                "fingerprint": sha256(repr(sorted(labels.items())).encode()).hexdigest()[:16],
            }
        )
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{group["alertname"]}", model_name="{model_name}"}}',
        "truncatedAlerts": 0,
        "status": status,
        "receiver": "flipwatch",
        "groupLabels": group,
        "commonLabels": entries[0]["labels"] if len(entries) == 1 else common,
        "commonAnnotations": entries[0]["annotations"] if len(entries) == 1 else {},
        "externalURL": "",
        "alerts": entries,
    }


def _refuted(alert: Alert, joined: Joined) -> bool:
    """Whether something that the alert rests on is known to be otherwise now."""
    return any(sign.answer is Answer.NO and sign.question in alert.rests_on for sign in joined.signs)


def _reasons(finding: FindingRecord) -> dict[int, str]:
    """Flagged block -> why."""
    return {place["block"]: place["reason"] for place in finding.body["places"]}


def _drifted(finding: FindingRecord) -> bool:
    """Something is wrong with a model that still gives numbers, and the finding names no block."""
    return finding.health is Health.FAILED and not finding.body["places"] and not _not_finite(finding)


def _not_finite(finding: FindingRecord) -> bool:
    """A judged finding of a monitor that measures the base loss, and there is no number for it."""
    return "base_loss_nats" in finding.body and finding.body["base_loss_nats"] is None


def _rfc3339(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
