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

from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import structlog

from ..monitors.alpha_scan import AlphaScan
from ..monitors.fingerprint.judgement import NAME as FINGERPRINT
from ..monitors.verdict.evidence import HEARTBEAT, Answer
from ..monitors.verdict.verdict import Joined, Verdict
from .alert import ALERTING, NAMES, VERDICT, Alert, webhook_body
from .alert_window import Window
from .records import FindingRecord

_CERTAIN = frozenset({FINGERPRINT, HEARTBEAT})
"""A digest does not err, and the heartbeat has waited long enough by itself."""

_JOINED = "verdict"
"""In the place of a monitor's name."""

_log = structlog.get_logger(__name__)


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
        self._windows: dict[str, Window] = {}
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

    def _window(self, monitor: str) -> Window:
        quiet = monitor in self._on_request
        return self._windows.setdefault(monitor, Window(monitor, self._k, self._n, quiet=quiet))

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


def _refuted(alert: Alert, joined: Joined) -> bool:
    """Whether something that the alert rests on is known to be otherwise now."""
    return any(sign.answer is Answer.NO and sign.question in alert.rests_on for sign in joined.signs)
