"""Metrics of the fingerprint: what is covered, what has changed, what sweeps cost.  What is not known is absent."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..monitors.fingerprint.facts import RankReading, SealFacts
from ..monitors.fingerprint.judgement import NAME
from .live import Integrity, Live, Tally

R = TypeVar("R", SealFacts, RankReading)

SKIPPED = ("running", "interrupted", "misfire")

_SEALS: tuple[tuple[str, str, Callable[[SealFacts], float]], ...] = (
    (
        "bytes",
        "Bytes of weights, those that no digest covers included as far as their size is known.",
        lambda seal: seal.covered_bytes + sum(tensor.bytes or 0 for tensor in seal.not_covered),
    ),
    ("covered_bytes", "Bytes of weights that a digest covers.", lambda seal: seal.covered_bytes),
    ("parity_bytes", "Bytes of parity from which chunks are put right.", lambda seal: seal.parity_bytes),
    ("baseline_timestamp_seconds", "Unix time at which the baseline was recorded.", lambda seal: seal.recorded_at),
)
_READINGS: tuple[tuple[str, str, Callable[[RankReading], float]], ...] = (
    ("chunks", "Chunks that the last sweep looked at.", lambda reading: reading.chunks),
    (
        "changed_chunks",
        "Chunks that were not those of the baseline in the last sweep.",
        lambda reading: reading.bad_chunks,
    ),
)


def of_weights(live: Live, model_name: str) -> Iterable[Metric]:
    """Everything about sweeps; gauges of weights only while the probe answers."""
    known = live.integrity if live.up else Integrity()
    seals = [] if known.facts is None else known.facts.ranks
    readings = [] if known.reading is None else known.reading.ranks
    yield from (_by_rank(name, text, model_name, seals, of) for name, text, of in _SEALS)
    yield from (_by_rank(name, text, model_name, readings, of) for name, text, of in _READINGS)
    verified = GaugeMetricFamily(
        "flipwatch_checkpoint_verified",
        "Whether the last check of the checkpoint found nothing wrong (1) or not (0); absent when there was none.",
        labels=["model_name"],
    )
    verdict, now = known.verdict, live.facts
    if verdict is not None and now is not None and verdict.boot_id == now.boot_id:
        verified.add_metric([model_name], int(verdict.verified))
    yield verified
    yield from _of_sweeps(live.tally(NAME), readings)


def counter(name: str, text: str, value: float) -> Metric:
    """A counter without labels."""
    return CounterMetricFamily(f"flipwatch_{name}", text, value=value)


def skipped(name: str, what: str, tally: Tally) -> Metric:
    """What was due and did not come to its end."""
    family = CounterMetricFamily(
        f"flipwatch_{name}_skipped",
        f"{what} that were due and did not start (running, misfire), or gave way to a mitigation (interrupted).",
        labels=["reason"],
    )
    for reason in sorted({*SKIPPED, *tally.skipped}):
        family.add_metric([reason], tally.skipped[reason])
    return family


def _of_sweeps(tally: Tally, readings: list[RankReading]) -> Iterable[Metric]:
    at = GaugeMetricFamily("flipwatch_sweep_timestamp_seconds", "Unix time at which the last successful sweep ended.")
    if tally.last_at is not None:
        at.add_metric([], tally.last_at)
    took = GaugeMetricFamily(
        "flipwatch_sweep_seconds", "Time that the last sweep spent on digests, of the slowest rank; without pauses."
    )
    if readings:
        took.add_metric([], max(reading.seconds for reading in readings))
    whole = GaugeMetricFamily(
        "flipwatch_sweep_duration_seconds", "Wall time of the last successful sweep, pauses included."
    )
    if tally.last_seconds is not None:
        whole.add_metric([], tally.last_seconds)
    yield from (at, took, whole)
    yield counter(
        "sweeps", "Sweeps over the weights that were started, new baselines and checks included.", tally.started
    )
    yield counter("sweep_failures", "Sweeps that could not be done.", tally.failures)
    yield skipped("sweeps", "Sweeps", tally)
    yield counter("sweep_parts", "Parts of sweeps; the engine serves between two of them.", tally.parts)
    yield counter("sweep_held_seconds", "Time for which parts of sweeps held vLLM's engine.", tally.held_seconds)


def _by_rank(name: str, text: str, model_name: str, ranks: Iterable[R], of: Callable[[R], float]) -> Metric:
    family = GaugeMetricFamily(f"flipwatch_weights_{name}", text, labels=["model_name", "rank"])
    for rank in ranks:
        family.add_metric([model_name, str(rank.rank.rank)], of(rank))
    return family
