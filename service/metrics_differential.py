"""Metrics of the differential monitor: how far each block lies from its reference, and what that costs.

What is not known or not finite is absent.
"""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from ..monitors.differential.facts import NAME
from ..monitors.differential.finding import DifferentialFinding
from .live import Live, Tally
from .metrics_integrity import counter, skipped


def of_differential(live: Live, model_name: str, recorded_at: float | None) -> Iterable[Metric]:
    """The last finding, the recorded states that are kept (epoch seconds), and the runs."""
    finding = live.state(NAME).finding
    yield from _of_blocks(finding if isinstance(finding, DifferentialFinding) else None, model_name)
    recorded = GaugeMetricFamily(
        "flipwatch_recording_timestamp_seconds",
        "Unix time at which the states that are kept were recorded; absent when there are none.",
    )
    if recorded_at is not None:
        recorded.add_metric([], recorded_at)
    yield recorded
    yield from _of_runs(live.tally(NAME))


def _of_blocks(finding: DifferentialFinding | None, model_name: str) -> Iterable[Metric]:
    labels = ["model_name", "block"]
    divergence = GaugeMetricFamily(
        "flipwatch_block_divergence",
        "How far the output of a block lies from its reference's on the same input, the largest of the tokens: "
        "relative L2 distance (l2) or 1 - cosine similarity (cosine).",
        labels=[*labels, "measure", "reference"],
    )
    allowed = GaugeMetricFamily(
        "flipwatch_block_divergence_allowed", "The l2 up to which a block does not depart.", labels=labels
    )
    departs = GaugeMetricFamily(
        "flipwatch_block_departs",
        "Whether a block computes something else than its reference (1) or not (0); absent where it cannot be told.",
        labels=labels,
    )
    walk = GaugeMetricFamily(
        "flipwatch_walk_divergence",
        "Relative L2 distance of the stream behind a block in the model as served, with what the blocks in front of it "
        "hand on.",
        labels=labels,
    )
    for block in finding.blocks if finding is not None else ():
        at = [model_name, str(block.block)]
        for measure, value in (("l2", block.l2), ("cosine", block.cosine)):
            if value is not None and finding is not None:
                divergence.add_metric([*at, measure, finding.reference.value], value)
        if block.allowed is not None:
            allowed.add_metric(at, block.allowed)
        if block.departs is not None:
            departs.add_metric(at, int(block.departs))
        if block.walk_l2 is not None:
            walk.add_metric(at, block.walk_l2)
    yield from (divergence, allowed, departs, walk)


def _of_runs(tally: Tally) -> Iterable[Metric]:
    at = GaugeMetricFamily(
        "flipwatch_differential_timestamp_seconds", "Unix time at which the last successful comparison ended."
    )
    if tally.last_at is not None:
        at.add_metric([], tally.last_at)
    took = GaugeMetricFamily(
        "flipwatch_differential_seconds", "Wall time of the last successful comparison, pauses included."
    )
    if tally.last_seconds is not None:
        took.add_metric([], tally.last_seconds)
    yield from (at, took)
    yield counter(
        "differentials", "Comparisons with a reference that were started, recordings included.", tally.started
    )
    yield counter("differential_failures", "Comparisons that could not be done.", tally.failures)
    yield skipped("differentials", "Comparisons", tally)
    yield counter("differential_parts", "Parts of comparisons; the engine serves between two of them.", tally.parts)
    yield counter(
        "differential_held_seconds",
        "Time for which parts of comparisons held vLLM's engine; a peer's is not counted.",
        tally.held_seconds,
    )
