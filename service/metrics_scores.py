"""Metrics of what the last scan measured: scores of the blocks, the thresholds of each rule, the clean profile."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from ..monitors.alpha_scan import QUICK_GRID, AlphaScanFinding, Profile, Thresholds
from .skippability import loss_without

_SCORES = ("bss", "slope", "skip_gain", "largest_deviation")
_REFERENCES = {"blocks": "z", "profile": "profile_z"}
"""What a z is taken against -> how the finding names it."""


def of_blocks(finding: AlphaScanFinding | None, model_name: str) -> Iterable[Metric]:
    """Scores, z and flags of all blocks of the last finding."""
    block_labels = ["model_name", "block"]
    zscore = GaugeMetricFamily(
        "flipwatch_block_zscore",
        "Robust z of a block's score from the last scan: over all blocks (reference blocks), or of its distance from "
        "the block's own healthy value (reference profile).",
        labels=[*block_labels, "score", "reference"],
    )
    score = GaugeMetricFamily(
        "flipwatch_block_score",
        "A block's score from the last scan, in nats per scored token (slope: per unit of alpha).",
        labels=[*block_labels, "score"],
    )
    gain_t = GaugeMetricFamily(
        "flipwatch_block_skip_gain_t",
        "A block's skip gain over its standard error, from the last scan.",
        labels=block_labels,
    )
    without = GaugeMetricFamily(
        "flipwatch_block_loss_without_nats",
        "Loss on the validation set without the block, as the last scan measured it; absent when it is not known.",
        labels=block_labels,
    )
    at_alpha = GaugeMetricFamily(
        "flipwatch_block_loss_nats",
        "Loss on the validation set with the block scaled by alpha and all others as served, from the last scan, at "
        "the alphas of the quick grid; absent when it is not known or not finite.",
        labels=[*block_labels, "alpha"],
    )
    without_drift = GaugeMetricFamily(
        "flipwatch_block_without_drift_nats",
        "That loss above the same of the clean profile, near 0 for the one damaged block; absent without a profile.",
        labels=block_labels,
    )
    flagged = GaugeMetricFamily(
        "flipwatch_block_flagged", "Whether the last scan flagged the block (1) or not (0).", labels=block_labels
    )
    for block in finding.blocks if finding is not None else ():
        at = [model_name, str(block.block)]
        for which in _SCORES:
            if (value := getattr(block, which)) is not None:
                score.add_metric([*at, which], value)
            for reference, suffix in _REFERENCES.items():
                if (z := getattr(block, f"{which}_{suffix}")) is not None:
                    zscore.add_metric([*at, which, reference], z)
        if block.skip_gain_t is not None:
            gain_t.add_metric(at, block.skip_gain_t)
        if finding is not None and (loss := loss_without(finding, block.block)) is not None:
            without.add_metric(at, loss)
        # A scan that had to leave another block out says nothing of the model as served.
        for alpha, nats in block.curve if finding is not None and not finding.left_out else ():
            # A bound for the number of series: a full grid has nine alphas.
            if alpha in QUICK_GRID and nats is not None:
                at_alpha.add_metric([*at, f"{alpha:g}"], nats)
        if block.without_drift_nats is not None:
            without_drift.add_metric(at, block.without_drift_nats)
        flagged.add_metric(at, int(block.flagged))
    yield from (zscore, score, gain_t, without, at_alpha, without_drift, flagged)


def of_thresholds(thresholds: Thresholds) -> Iterable[Metric]:
    """From where on a number counts, by rule."""
    tau = GaugeMetricFamily(
        "flipwatch_threshold", "Tau, the z above which a block stands out; a z alone flags nothing.", labels=["score"]
    )
    for which in _SCORES:
        tau.add_metric([which], thresholds.tau)
    yield tau
    for name, text, value in (
        ("skip_gain_threshold_nats", "Rule harm: the least skip gain that flags a block.", thresholds.min_gain_nats),
        ("skip_gain_t_threshold", "Rule harm: the least skip gain in standard errors.", thresholds.min_gain_t),
        ("drift_threshold_nats", "Rule drift: the least drift of a damaged model.", thresholds.min_drift_nats),
    ):
        yield GaugeMetricFamily(f"flipwatch_{name}", text, value=value)


def of_profile(profile: Profile | None, finding: AlphaScanFinding | None, model_name: str) -> Iterable[Metric]:
    """The clean profile that is kept, and what the last scan found against it."""
    info = GaugeMetricFamily(
        "flipwatch_profile_info",
        "The clean profile that is kept; always 1, absent when there is none.",
        labels=["model_name", "model_digest", "engine", "dtype"],
    )
    recorded = GaugeMetricFamily(
        "flipwatch_profile_timestamp_seconds",
        "Unix time at which the clean profile was recorded; absent when there is none.",
    )
    if profile is not None:
        of = profile.provenance
        info.add_metric([of.model, of.model_digest, of.engine, of.dtype], 1)
        recorded.add_metric([], profile.recorded_at)
    used = GaugeMetricFamily(
        "flipwatch_profile_used", "Whether the last scan was judged with the clean profile (1) or without one (0)."
    )
    drift = GaugeMetricFamily(
        "flipwatch_drift_nats",
        "How far the loss lay above its healthy value in the last scan, nats per scored token; absent without a "
        "profile.",
        labels=["model_name"],
    )
    drift_t = GaugeMetricFamily("flipwatch_drift_t", "The same over its standard error.", labels=["model_name"])
    if finding is not None:
        used.add_metric([], int(finding.profile_recorded_at is not None))
        if finding.drift_nats is not None:
            drift.add_metric([model_name], finding.drift_nats)
        if finding.drift_t is not None:
            drift_t.add_metric([model_name], finding.drift_t)
    yield from (info, recorded, used, drift, drift_t)
