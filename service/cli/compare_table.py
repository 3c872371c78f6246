"""A comparison in the terminal: its sentence, the two models, what changed most, and a row for each block."""

import math

from ...monitors.differential.finding import BlockDivergence
from ..compared import ComparedSide, Comparison, excess
from .show import console, number, table

_MOST = 3
"""So many blocks are named as those that changed most."""


def print_comparison(comparison: Comparison) -> None:
    """Print it on standard output."""
    finding = comparison.finding
    out = console()
    out.print(f"{finding.health.value}: {finding.reason}", markup=False)
    blocks = {block.block: block for block in finding.blocks}
    changed = [blocks[number] for number in comparison.ranking if blocks[number].l2 != 0.0]
    for place, block in enumerate(changed[:_MOST], start=1):
        out.print(f"{place}. block {block.block}: {_told(block)}", markup=False)
    if not changed:
        out.print("no block differs at all")
    out.print(_line("A", comparison.a, finding.reference_nats), markup=False)
    out.print(_line("B", comparison.b, finding.nats), markup=False)
    out.print(f"measured on {comparison.tokens} tokens in {comparison.sequences} sequences")
    _print_rows(comparison)


def _line(name: str, side: ComparedSide, nats: float | None) -> str:
    conditions = side.conditions
    loss = "loss not finite" if nats is None else f"loss {nats:.4f} nats"
    gated = [f"block {block} at {alpha:g}" for block, alpha in enumerate(side.gates) if alpha != 1.0]
    served = f", served with {', '.join(gated)}: so are its losses and its walk" if gated else ""
    return f"{name}: {side.source} ({conditions.architecture}, {conditions.dtype}, {conditions.engine}), {loss}{served}"


def _told(block: BlockDivergence) -> str:
    if block.l2 is None:
        return block.reason
    over = excess(block)
    if over is None:
        return f"distance {block.l2:.3g}"
    if math.isinf(over):
        return f"distance {block.l2:.3g}, and none is allowed"
    return f"distance {block.l2:.3g}, {over:.3g} times what is allowed"


def _print_rows(comparison: Comparison) -> None:
    costs = {block.block: block for block in comparison.blocks}
    columns = ["block", "l2", "1 - cos", "allowed", "walk l2"]
    if costs:
        columns += ["without it: A", "B", "skip gain: A", "B"]
    shown = table(*columns, "")
    for block in comparison.finding.blocks:
        cells = [
            str(block.block),
            _small(block.l2),
            _small(block.cosine),
            _small(block.allowed),
            _small(block.walk_l2),
        ]
        if cost := costs.get(block.block):
            cells += [
                number(cost.a.loss_without_nats),
                number(cost.b.loss_without_nats),
                number(cost.a.skip_gain_nats),
                number(cost.b.skip_gain_nats),
            ]
        shown.add_row(*cells, {True: "departs", False: "", None: "cannot tell"}[block.departs])
    console().print(shown)


def _small(value: float | None) -> str:
    """Three digits, whatever the size; a dash where there is no number."""
    return "-" if value is None else "0" if value == 0 else f"{value:.2e}"
