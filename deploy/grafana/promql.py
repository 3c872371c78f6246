"""Queries that more than one panel needs.  `$job`, `$instance` and `$model_name` are variables of the boards."""

from collections.abc import Iterable

SERVER = "job, instance"
"""What tells one server from another."""
PLACED = "job, instance, namespace, pod"
"""The same with where it runs; the last two exist in Kubernetes only."""

BLOCK = f"{SERVER}, block"
HELD = {
    "scans": "flipwatch_engine_held_seconds_total",
    "sweeps": "flipwatch_sweep_held_seconds_total",
    "comparisons": "flipwatch_differential_held_seconds_total",
}
"""What counts the time for which the engine is held.  The canary holds nothing."""
LAST = {
    "alpha_scan": "flipwatch_last_scan_timestamp_seconds",
    "fingerprint": "flipwatch_sweep_timestamp_seconds",
    "differential": "flipwatch_differential_timestamp_seconds",
    "canary": "flipwatch_canary_timestamp_seconds",
}
"""Monitor -> what tells when it last came to its end."""
SCORE = 'score="$score"'
REFERENCE = 'reference="$reference"'
"""Which z: variables of the boards."""

_WITHOUT_MODEL = frozenset(
    {
        "up",
        "flipwatch_up",
        "flipwatch_build_info",
        "flipwatch_gates_usable",
        "flipwatch_threshold",
        "flipwatch_skip_gain_threshold_nats",
        "flipwatch_skip_gain_t_threshold",
        "flipwatch_drift_threshold_nats",
        "flipwatch_profile_timestamp_seconds",
        "flipwatch_profile_used",
        "flipwatch_verdict",
        "flipwatch_health_state",
        "flipwatch_last_scan_timestamp_seconds",
        "flipwatch_scan_duration_seconds",
        "flipwatch_scan_passes",
        "flipwatch_sweep_timestamp_seconds",
        "flipwatch_sweep_seconds",
        "flipwatch_sweep_duration_seconds",
        "flipwatch_recording_timestamp_seconds",
        "flipwatch_differential_timestamp_seconds",
        "flipwatch_differential_seconds",
        "flipwatch_pulse",
        "flipwatch_canary_recorded_timestamp_seconds",
        "flipwatch_canary_timestamp_seconds",
        "flipwatch_canary_seconds",
        "flipwatch_drained",
        "flipwatch_alert_firing",
        "flipwatch_verdict_firing",
        "flipwatch_schedule_seconds",
    }
)
"""Metrics about the sidecar or the server as a whole, and counters: they have no label `model_name`."""


def of(metric: str, *matchers: str) -> str:
    """A selector of `metric` by the variables that it has labels for, and by more matchers."""
    by = ['job=~"$job"', 'instance=~"$instance"']
    if metric not in _WITHOUT_MODEL and not metric.endswith("_total"):
        by.append('model_name=~"$model_name"')
    return f"{metric}{{{', '.join([*by, *matchers])}}}"


def of_vllm(name: str, *matchers: str) -> str:
    """A selector of vLLM's own metric vllm:NAME, by model.

    Scraped by a Prometheus before 3 it is vllm_NAME: prometheus-client 0.26 then writes OpenMetrics without colons.
    """
    return "{" + ", ".join([f'__name__=~"vllm[:_]{name}"', 'model_name=~"$model_name"', *matchers]) + "}"


def largest(metric: str, *matchers: str, by: str = SERVER) -> str:
    """The largest of a metric, by labels."""
    return f"max by ({by}) ({of(metric, *matchers)})"


def total(metric: str, *matchers: str, by: str = SERVER) -> str:
    """The sum of a metric, by labels."""
    return f"sum by ({by}) ({of(metric, *matchers)})"


def age(metric: str, by: str = SERVER) -> str:
    """Seconds since a time that a metric tells."""
    return f"time() - {largest(metric, by=by)}"


def lateness(by: str = SERVER) -> str:
    """Age of each monitor's last run over the time between its runs, by labels and by monitor."""
    ages = (f'label_replace({age(metric, by)}, "monitor", "{name}", "", "")' for name, metric in LAST.items())
    return f"({' or '.join(ages)}) / on ({by}, monitor) {largest('flipwatch_schedule_seconds', by=f'{by}, monitor')}"


def rate(metric: str, by: str = SERVER) -> str:
    """How fast a counter grows, per second."""
    return f"sum by ({by}) (rate({of(metric)}[$__rate_interval]))"


def increase(metric: str, by: str = SERVER) -> str:
    """By how much a counter grew from one point of a graph to the next."""
    return f"sum by ({by}) (increase({of(metric)}[$__rate_interval]))"


def grown(metric: str, by: str = SERVER) -> str:
    """By how much a counter grew in the time that the board shows."""
    return f"sum by ({by}) (increase({of(metric)}[$__range]))"


def coded(metric: str, label: str, names: Iterable[str], by: str = SERVER) -> str:
    """The place (from 1) of the one of `names` whose series is 1, as one number by labels."""
    series = [of(metric, f'{label}="{name}"') for name in names]
    return f"sum by ({by}) ({' or '.join(f'{at} * {one}' for at, one in enumerate(series, 1))})"


def known(by: str = SERVER) -> str:
    """A series for each sidecar that Prometheus reached in the time that the board shows, also if it is away now."""
    return f"max by ({by}) (present_over_time({of('flipwatch_up')}[$__range]))"


def away(by: str = SERVER) -> str:
    """0 for each such sidecar that does not answer Prometheus now, nothing for the others."""
    return f"(max by ({by}) ({of('up')} == 0) and on ({SERVER}) {known()})"


def since(state: str, by: str = SERVER) -> str:
    """Unix time in ms from which on `state`, a selector of 0 or 1, has been 1 without a break.

    The time at which it was 0 last; when it never was 0 while the board looks, the time at which it was 1 first.
    """
    window = "[$__range:$__interval]"
    when = f"max_over_time(timestamp({state} == 0){window}) or min_over_time(timestamp({state} == 1){window})"
    return f"1000 * max by ({by}) (({when}) and ({state} == 1))"


def in_order(expression: str) -> str:
    """The same with block 3 as 003, because Grafana and Prometheus sort labels as text."""
    for digits, zeros in (("[0-9][0-9]", "0"), ("[0-9]", "00")):
        expression = f'label_replace({expression}, "block", "{zeros}$1", "block", "({digits})")'
    return expression


def over_tau(by: str) -> str:
    """z of the chosen score over tau, by labels that hold job and instance."""
    z = largest("flipwatch_block_zscore", SCORE, REFERENCE, by=by)
    return f"{z} / on ({SERVER}) group_left () {largest('flipwatch_threshold', SCORE)}"
