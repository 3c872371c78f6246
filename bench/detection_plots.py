"""The plots of the detection benchmark."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from detection_judge import SCORES, Verdict

matplotlib.use("Agg")
from matplotlib import pyplot


def roc(path: Path, singles: Sequence[Verdict], healthy: Sequence[tuple[int, Any]], title: str) -> None:
    """Share of faults of at least 0.1 nats that a threshold finds, against the share of healthy scans that it flags.

    Faults that the first pass names have no curves, so that no score could be fair to them.

    Healthy scans of the faults' own size of the validation set only, where there are any; scores with a profile have no
    healthy scans and are not drawn.
    """
    damaged = [v for v in singles if v.complete and v.damage is not None and v.damage >= 0.1]
    size = min({n for n, _ in healthy}, key=lambda n: abs(n - len(singles[0].readings[0].base_nats)), default=None)
    sound = [finding for n, finding in healthy if n == size]
    if not damaged or not sound:
        return
    figure, axes = pyplot.subplots(figsize=(6, 5))
    for score in SCORES:
        if score.profile:
            continue
        bad = np.array([_or_least(v.top(score)) for v in damaged])
        good = np.array(
            [_or_least(max((x for s in f.blocks if (x := score.value(s)) is not None), default=None)) for f in sound]
        )
        cuts = np.unique(np.concatenate([bad, good, [np.inf]]))[::-1]
        axes.plot(
            [(good >= cut).mean() for cut in cuts],
            [(bad >= cut).mean() for cut in cuts],
            drawstyle="steps-post",
            label=score.name,
        )
    axes.set(
        xlabel=f"share of {len(sound)} healthy scans flagged",
        ylabel=f"share of {len(damaged)} faults with curves, 0.1 nats or more, found",
        title=title,
        xlim=(-0.02, 1.02),
        ylim=(0, 1.02),
    )
    axes.legend(loc="lower right", fontsize="small")
    _save(figure, path)


def gains(path: Path, singles: Sequence[Verdict], skippable: Sequence[int], title: str) -> None:
    """Skip gain of the damaged block against the damage; crosses were not flagged."""
    figure, axes = pyplot.subplots(figsize=(6, 5))
    for able, colour, label in ((True, "tab:blue", "skippable block"), (False, "tab:grey", "other block")):
        for flagged, marker in ((True, "o"), (False, "x")):
            points = [
                (v.damage, gain)
                for v in singles
                if v.complete and v.damage is not None
                for block in v.case.blocks
                if (block in skippable) == able
                and (block in v.finding.flagged) == flagged
                and (gain := v.finding.blocks[block].skip_gain) is not None
            ]
            if points:
                how = "flagged" if flagged else "not flagged"
                axes.scatter(*zip(*points, strict=True), s=18, marker=marker, color=colour, label=f"{label}, {how}")
    axes.axhline(0.1, color="black", linewidth=0.5)
    axes.set(xlabel="damage in nats", ylabel="skip gain of the damaged block in nats", title=title)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.legend(fontsize="small")
    _save(figure, path)


def recovered(path: Path, singles: Sequence[Verdict], skippable: Sequence[int], title: str) -> None:
    """Share of the lost loss that comes back without the flagged blocks."""
    points = [
        (v.damage, v.recovered, set(v.case.blocks) <= set(skippable))
        for v in singles
        if v.damage is not None and v.recovered is not None
    ]
    if not points:
        return
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for able, colour, label in ((True, "tab:blue", "skippable block"), (False, "tab:grey", "other block")):
        some = [(damage, share) for damage, share, able_too in points if able_too == able]
        if some:
            axes.scatter(*zip(*some, strict=True), s=18, color=colour, label=label)
    axes.axhline(0.8, color="black", linewidth=0.5)
    axes.set(xlabel="damage in nats", ylabel="recovered share", title=title, ylim=(-0.5, 1.05))
    axes.set_xscale("log")
    axes.legend(fontsize="small")
    _save(figure, path)


def _or_least(value: float | None) -> float:
    return -np.inf if value is None else value


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
