"""States as numbers: one series per server, from the series of 0 or 1 that the sidecar exports for each state."""

from promql import away, coded, largest
from states import SYMPTOMS, VERDICTS, Look

AWAY = Look("sidecar away", "#404040")


def verdict_codes(by: str) -> str:
    """The number of each server's verdict; 0 where the sidecar does not answer Prometheus."""
    return f"{coded('flipwatch_verdict', 'verdict', VERDICTS, by)} or {away(by)}"


def symptom_codes(by: str) -> str:
    """The number of the canary's symptom; 0 where the canary does not know."""
    unknown = largest("flipwatch_health_state", 'monitor="canary"', 'state="unknown"', by=by)
    codes = coded("flipwatch_canary_symptom", "symptom", SYMPTOMS, by)
    return f"{codes} * on ({by}) (1 - {unknown}) or 0 * ({unknown} == 1)"
