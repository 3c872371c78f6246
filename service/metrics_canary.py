"""Metrics of the canary and of the heartbeat.  What is not known is absent."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from ..monitors.canary.finding import NAME, CanaryFinding, Symptom
from ..monitors.canary.pulse import Pulse
from .live import Live
from .metrics_integrity import counter, skipped


def of_canary(live: Live, model_name: str, expected_at: float | None) -> Iterable[Metric]:
    """The pulse, the last finding, the answers that are kept (epoch seconds), and the runs."""
    pulse = GaugeMetricFamily(
        "flipwatch_pulse",
        "Whether vLLM moves, by its own counters: 1 for the state it is in, 0 for the others.",
        labels=["state"],
    )
    for state in Pulse:
        pulse.add_metric([state.value], int(live.beat.pulse is state))
    yield pulse
    finding = live.state(NAME).finding
    yield from _of_answers(finding if isinstance(finding, CanaryFinding) else None, model_name)
    recorded = GaugeMetricFamily(
        "flipwatch_canary_recorded_timestamp_seconds",
        "Unix time at which the expected answers that are kept were recorded; absent when there are none.",
    )
    if expected_at is not None:
        recorded.add_metric([], expected_at)
    yield recorded
    tally = live.tally(NAME)
    at = GaugeMetricFamily("flipwatch_canary_timestamp_seconds", "Unix time at which the canary last had its answers.")
    if tally.last_at is not None:
        at.add_metric([], tally.last_at)
    took = GaugeMetricFamily("flipwatch_canary_seconds", "Wall time of all its prompts.")
    if tally.last_seconds is not None:
        took.add_metric([], tally.last_seconds)
    yield from (at, took)
    yield counter("canaries", "Runs of the canary that were started, recordings included.", tally.started)
    yield counter("canary_failures", "Runs that could not be done.", tally.failures)
    yield skipped("canaries", "Runs of the canary", tally)


def _of_answers(finding: CanaryFinding | None, model_name: str) -> Iterable[Metric]:
    symptom = GaugeMetricFamily(
        "flipwatch_canary_symptom",
        "What is wrong with the answers to the fixed prompts: 1 for the symptom they have, 0 for the others.",
        labels=["model_name", "symptom"],
    )
    wrong = GaugeMetricFamily("flipwatch_canary_wrong_prompts", "Prompts that have the symptom.", labels=["model_name"])
    slowest = GaugeMetricFamily(
        "flipwatch_canary_answer_seconds", "Longest time that one answer took.", labels=["model_name"]
    )
    scatter = GaugeMetricFamily(
        "flipwatch_canary_scatter",
        "Largest |change of log p| / (1 - p) of a token against the expected answers; absent for another token.",
        labels=["model_name", "reference"],
    )
    allowed = GaugeMetricFamily(
        "flipwatch_canary_scatter_allowed", "Up to where that is rounding, as measured.", labels=["model_name"]
    )
    if finding is not None:
        for one in Symptom:
            symptom.add_metric([model_name, one.value], int(finding.symptom is one))
        wrong.add_metric([model_name], len(finding.wrong))
        if finding.seconds is not None:
            slowest.add_metric([model_name], finding.seconds)
        if finding.scatter is not None and finding.reference is not None:
            scatter.add_metric([model_name, finding.reference.value], finding.scatter)
        if finding.tolerance is not None:
            allowed.add_metric([model_name], finding.tolerance)
    yield from (symptom, wrong, slowest, scatter, allowed)
