"""A comparison as a plot: how far each block lies away, beside how far it may.  matplotlib is imported when needed."""

from pathlib import Path

from .compared import Comparison

_FLOOR = 1e-9
"""A logarithmic axis has no 0: where nothing differs, it still has to end somewhere."""


def draw(comparison: Comparison, file: Path) -> None:
    """Write a png or svg, by the suffix; raises `OSError`."""
    from matplotlib.figure import Figure

    blocks = comparison.finding.blocks
    figure = Figure(figsize=(max(6.0, 0.25 * len(blocks) + 2.0), 4.0), layout="constrained")
    axes = figure.subplots()
    values = [value for block in blocks for value in (block.l2, block.allowed) if value]
    bottom, top = min(values, default=_FLOOR) / 30.0, max(values, default=1.0) * 3.0
    # Before anything is drawn: an axis that finds its own limits complains where there is nothing but 0.
    axes.set(ylim=(bottom, top), yscale="log")
    for departs, colour, label in (
        (False, "tab:blue", "within what is allowed"),
        (True, "tab:red", "departs"),
        (None, "tab:grey", "cannot tell"),
    ):
        bars = [block for block in blocks if block.departs is departs]
        if bars:
            # One that is not finite reaches to the top.
            heights = [top if block.l2 is None and departs else block.l2 or 0.0 for block in bars]
            axes.bar([block.block for block in bars], heights, color=colour, label=label)
    allowed = [block for block in blocks if block.allowed]
    if allowed:
        axes.scatter(
            [block.block for block in allowed],
            [block.allowed or 0.0 for block in allowed],
            color="black",
            marker="_",
            label="allowed",
            zorder=3,
        )
    axes.set(
        xlabel="block",
        ylabel="relative L2 distance",
        xlim=(-1, len(blocks)),
        title=f"{_short(comparison.b.source)} against {_short(comparison.a.source)}",
    )
    axes.legend(fontsize="small")
    figure.savefig(file)


def _short(source: str) -> str:
    """The end of a long path or URL."""
    return source if len(source) <= 30 else f"...{source[-27:]}"
