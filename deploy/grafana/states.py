"""How boards show a state: its words and its colour.  Only what is known to be good is green."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flipwatch.monitors.canary.finding import Symptom
from flipwatch.monitors.canary.pulse import Pulse
from flipwatch.monitors.finding import Health
from flipwatch.monitors.verdict.verdict import Verdict

JSON = dict[str, Any]

NOT_KNOWN = "#7a7a7a"
"""Grey."""


class Look(NamedTuple):
    """Words and colour of one state."""

    text: str
    color: str


# Written as a table; a state that is missing here stops the program.
_VERDICTS = {
    Verdict.OK: Look("ok", "green"),
    Verdict.MITIGATED: Look("mitigated", "blue"),
    Verdict.WEIGHT_FAULT: Look("weight fault", "dark-red"),
    Verdict.LATENT_WEIGHT_FAULT: Look("latent weight fault", "orange"),
    Verdict.OLD_FAULT: Look("old fault", "semi-dark-red"),
    Verdict.SERVING_FAULT: Look("serving fault", "red"),
    Verdict.HUNG: Look("hung", "purple"),
    Verdict.UNKNOWN: Look("unknown", NOT_KNOWN),
}
_HEALTH = {
    Health.OK: Look("ok", "green"),
    Health.DEGRADED: Look("degraded", "orange"),
    Health.FAILED: Look("failed", "red"),
    Health.UNKNOWN: Look("unknown", NOT_KNOWN),
}
_PULSES = {
    Pulse.IDLE: Look("idle", "light-blue"),
    Pulse.MOVING: Look("moving", "green"),
    Pulse.HUNG: Look("hung", "purple"),
    Pulse.UNKNOWN: Look("unknown", NOT_KNOWN),
}
_SYMPTOMS = {
    Symptom.NONE: Look("no symptom", "green"),
    Symptom.NOT_FINITE: Look("not finite", "dark-red"),
    Symptom.TIMED_OUT: Look("timed out", "purple"),
    Symptom.REFUSED: Look("refused", "red"),
    Symptom.DEGENERATE: Look("degenerate", "semi-dark-red"),
    Symptom.CACHE_DIFFERS: Look("cache differs", "orange"),
    Symptom.CHANGED: Look("changed", "light-red"),
}
# In the order of the code, which is that of the numbers in the queries.
VERDICTS = {each.value: _VERDICTS[each] for each in Verdict}
HEALTH = {each.value: _HEALTH[each] for each in Health}
PULSES = {each.value: _PULSES[each] for each in Pulse}
SYMPTOMS = {each.value: _SYMPTOMS[each] for each in Symptom}

ABSENT: JSON = {
    "type": "special",
    "options": {"match": "null+nan", "result": {"text": "no data", "color": NOT_KNOWN, "index": 99}},
}


def mapped(looks: Mapping[str, Look]) -> list[JSON]:
    """Value mappings: number as text -> look; what is absent is grey."""
    options = {
        value: {"text": look.text, "color": look.color, "index": at} for at, (value, look) in enumerate(looks.items())
    }
    return [{"type": "value", "options": options}, ABSENT]


def numbered(looks: Mapping[str, Look], zero: Look | None = None) -> list[JSON]:
    """Value mappings for the numbers of `promql.coded`, and for 0."""
    first = {} if zero is None else {"0": zero}
    return mapped(first | {str(at): look for at, look in enumerate(looks.values(), 1)})


def yes_no(yes: Look, no: Look) -> list[JSON]:
    """Value mappings for 1 and 0."""
    return mapped({"1": yes, "0": no})


GATE = mapped({"1": Look("normal", "text"), "0": Look("left out", "blue")})
"""Value mappings for an alpha as served."""
