"""How many series a sidecar exports: the table of docs/metrics.md, counted from the collector itself.

    python -m tests.deploy.metric_series 16 30 80     # from the root of the repository; numbers of blocks

Every optional number is there, so this is the most that a server of one rank can export; without `differential.*` or a
clean profile it is less.
"""

import sys
from typing import NamedTuple

from flipwatch.monitors.alpha_scan import FULL_GRID, BlockScore

from ..service.metrics_rig import DIVERGENCE, FACTS, FINDING, divergence, known, registry
from ..service.toy_profile import PROFILE


class Series(NamedTuple):
    """Series of a server."""

    blocks: int
    total: int
    by_block: int
    """Those with a label `block`."""
    differential: int
    """Those of them that only the differential monitor makes."""
    profile: int
    """Those of them that only a clean profile makes."""


def count(blocks: int) -> Series:
    """All samples of one scrape of a server of so many blocks, about which everything is known."""
    live, alerts = known()
    live.every_minutes = dict.fromkeys(("alpha_scan", "fingerprint", "differential", "canary"), 60.0)
    live.facts = FACTS.model_copy(update={"num_blocks": blocks, "gates": [1.0] * blocks})
    scores = tuple(_score(block) for block in range(blocks))
    live.found(FINDING.model_copy(update={"blocks": scores, "gates": (1.0,) * blocks}), "scan", 1_800_000_000.0)
    compared = tuple(divergence(block, 0.125, False) for block in range(blocks))
    live.found(DIVERGENCE.model_copy(update={"blocks": compared}), "comparison", 1_800_000_600.0)
    samples = [
        sample for family in registry(live, alerts, PROFILE, PROFILE.recorded_at).collect() for sample in family.samples
    ]
    by_block = [sample for sample in samples if "block" in sample.labels]
    names = ("flipwatch_block_divergence", "flipwatch_block_departs", "flipwatch_walk_divergence")
    compared_only = [sample for sample in by_block if sample.name.startswith(names)]
    with_profile = [
        sample
        for sample in by_block
        if sample.labels.get("reference") == "profile" or sample.name == "flipwatch_block_without_drift_nats"
    ]
    return Series(blocks, len(samples), len(by_block), len(compared_only), len(with_profile))


def row(series: Series) -> str:
    """As the page has it."""
    return "| " + " | ".join(str(number) for number in series) + " |"


def _score(block: int) -> BlockScore:
    """A block of which every number is known."""
    numbers = {
        f"{score}{kind}": 0.5
        for score in ("bss", "slope", "skip_gain", "largest_deviation")
        for kind in ("", "_z", "_profile_z")
    }
    return BlockScore(
        block=block,
        **numbers,
        skip_gain_t=1.0,
        without_drift_nats=0.5,
        curve=tuple((alpha, 8.5) for alpha in FULL_GRID),
    )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(row(count(int(argument))))
