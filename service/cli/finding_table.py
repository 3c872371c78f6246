"""A finding in the terminal: its sentence, a table of the blocks with a bar for each score, and what the scan cost."""

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ...monitors.alpha_scan import AlphaScanFinding, BlockScore
from ..skippability import loss_without
from .show import console, number, table

EXIT = {"ok": 0, "degraded": 1, "failed": 1}
"""Exit code of a scan by the health it found; anything else is 2."""

_NOTABLE = 3
_BAR = 8


class Cost(NamedTuple):
    """What a scan took, in forward passes over the sequences that it measured."""

    passes: float
    naive: float
    """One pass for each loss of the grid."""
    seconds: float | None = None
    predicted: float | None = None
    """By the cost model, without padding."""

    def __str__(self) -> str:
        model = "" if self.predicted is None else f"by the cost model {self.predicted:.1f}, "
        wall = "" if self.seconds is None else f", {self.seconds:.0f} s"
        return f"cost: {self.passes:.1f} forward passes ({model}naive {self.naive:.0f}){wall}"


def naive_of(finding: AlphaScanFinding) -> float:
    """Naive cost of the grid that all blocks were measured at, as far as the finding tells."""
    grid = min((len(score.curve) for score in finding.blocks if score.curve), default=0)
    return 1.0 + grid * len(finding.blocks)


def print_finding(finding: AlphaScanFinding, cost: Cost, *, all_blocks: bool) -> None:
    """Print it; without `all_blocks` those that are flagged and the few with the largest skip gain or BSS."""
    out = console()
    out.print(f"{finding.health.value}: {finding.reason}", markup=False)
    rows = [score for score in finding.blocks if score.curve or score.flagged]
    if not all_blocks:
        rows = _notable(rows)
    if rows:
        _print_rows(finding, rows)
    hidden = len(finding.blocks) - len(rows)
    if hidden and not all_blocks:
        out.print(f"{hidden} more blocks with --all")
    out.print(str(cost))


def _notable(scores: Sequence[BlockScore]) -> list[BlockScore]:
    gains = sorted((s for s in scores if s.skip_gain is not None), key=lambda s: -(s.skip_gain or 0.0))
    by_bss = sorted((s for s in scores if s.bss is not None), key=lambda s: -(s.bss or 0.0))
    chosen = {score.block for score in gains[:_NOTABLE] + by_bss[:1]}
    return [score for score in scores if score.flagged or score.block in chosen]


def _print_rows(finding: AlphaScanFinding, rows: Sequence[BlockScore]) -> None:
    """Bars only on a terminal: elsewhere the table is for `grep` and `cut`."""
    bars = _bars(finding.blocks) if sys.stdout.isatty() else {}
    shown = table("block", "without it", "skip gain", "t", "BSS", "BSS z", "slope", "")
    for score in rows:
        shown.add_row(
            str(score.block),
            number(loss_without(finding, score.block)),
            number(score.skip_gain) + bars.get(("skip_gain", score.block), ""),
            number(score.skip_gain_t, 1),
            number(score.bss) + bars.get(("bss", score.block), ""),
            number(score.bss_z, 1),
            number(score.slope) + bars.get(("slope", score.block), ""),
            "flagged" if score.flagged else "",
        )
    console().print(shown)


def _bars(scores: Sequence[BlockScore]) -> dict[tuple[str, int], str]:
    """By score and block: `+` for each step above 0, `-` below.

    A bar is as long as the square root of the value over the largest of all blocks: one extreme block must not flatten
    the others.
    """
    made = {}
    for name in ("skip_gain", "bss", "slope"):
        values = {score.block: getattr(score, name) for score in scores}
        largest = max((abs(value) for value in values.values() if value is not None), default=0.0)
        for block, value in values.items():
            length = 0 if not value else round(_BAR * math.sqrt(abs(value) / largest))
            made[name, block] = " " + (("+" if (value or 0) > 0 else "-") * length).ljust(_BAR)
    return made
