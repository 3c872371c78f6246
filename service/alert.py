"""One alert that fires: its name, what it is about, how severe it is, and how Alertmanager's webhook says it."""

from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Literal

from ..monitors.verdict.evidence import Question
from ..monitors.verdict.verdict import Verdict

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

# What Alertmanager writes for "not ended yet".
_NO_END = "0001-01-01T00:00:00Z"


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


def _rfc3339(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
