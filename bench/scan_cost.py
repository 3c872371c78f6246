"""What prefix sharing saves: the alpha-scan against naive full passes, on the same model, texts and grid.

Naive: the base loss and every block and alpha are a full pass of their own through all blocks.  Shared: the scan as
it is.  Both run in this process, in turn, several times; the ratio is taken within each repeat.
"""

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from flipwatch.monitors.alpha_scan import (
    FULL_GRID,
    QUICK_GRID,
    AlphaScan,
    AlphaScanPlan,
    AlphaScanReading,
    chunks,
    padded,
)
from flipwatch.monitors.validation import ValidationItem, load_items
from flipwatch.probe.local import LocalView, make_plan, run_measurement

GRIDS = {"quick": QUICK_GRID, "full": FULL_GRID}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
T = TypeVar("T")

MODEL = Path(__file__).resolve().parents[1] / ".venv" / "model"
"""Link that `make setup` leaves."""

Scan = tuple[int | None, float]
"""Which block is scaled by how much; no block for the base loss."""

Losses = dict[Scan, list[float]]
"""Per scan, the loss of each sequence."""


def read_questions(path: Path) -> list[ValidationItem]:
    """Multiple-choice questions as JSONL with `question`, `choices` and `answer`, the index of the right choice."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [ValidationItem(prompt=row["question"], answer=" " + row["choices"][row["answer"]]) for row in rows]


def naive_scan(view: LocalView, plan: AlphaScanPlan, on_pass: Callable[[], None]) -> tuple[Losses, float]:
    """One full pass per block and alpha, in batches as large as the scan's.

    Returns the losses, the base ones under `(None, 1.0)`, and the forward-pass equivalents.
    """
    scans: list[Scan] = [(None, 1.0), *((block, alpha) for block in range(view.num_blocks) for alpha in plan.alphas)]
    losses: Losses = {scan: [math.nan] * len(plan.tokens) for scan in scans}
    work = 0
    for rows in chunks(plan.model_copy(update={"alphas": []})):
        tokens, scored = padded(plan, rows)
        for scaled, alpha in scans:
            hidden = view.embed(tokens)
            for index in range(view.num_blocks):
                out = view.block(index, hidden, tokens)
                if scaled == index:
                    mixed = hidden.float() + alpha * (out.float() - hidden.float())
                    out = hidden if alpha == 0.0 else mixed.to(hidden.dtype)
                hidden = out
                work += tokens.numel()
            for row, loss in zip(rows, view.nats(hidden, tokens, scored).tolist(), strict=True):
                losses[scaled, alpha][row] = loss
            on_pass()
    return losses, work / (view.num_blocks * sum(len(row) for row in plan.tokens))


def largest_difference(reading: AlphaScanReading, naive: Losses) -> tuple[float, float]:
    """Between both scans, in nats: of a single loss, and of a score of the judgement."""
    shared: Losses = {(None, 1.0): _finite(reading.base_nats)}
    for block, rows in enumerate(reading.nats):
        shared |= {(block, alpha): _finite(row) for alpha, row in zip(reading.alphas, rows, strict=True)}
    of_losses = max(abs(a - b) for scan in shared for a, b in zip(shared[scan], naive[scan], strict=True))
    from_naive = reading.model_copy(
        update={
            "base_nats": naive[None, 1.0],
            "nats": [[naive[block, a] for a in reading.alphas] for block in range(len(reading.nats))],
        }
    )
    pairs = zip(AlphaScan().judge(reading).blocks, AlphaScan().judge(from_naive).blocks, strict=True)
    of_scores = max(
        abs(getattr(mine, name) - getattr(theirs, name))
        for mine, theirs in pairs
        for name in ("bss", "slope", "skip_gain", "largest_deviation")
        if getattr(mine, name) is not None
    )
    return of_losses, of_scores


def _finite(losses: list[float | None]) -> list[float]:
    """The benchmark needs a healthy model."""
    if any(loss is None for loss in losses):
        raise typer.BadParameter("the model's loss is not finite; take a healthy checkpoint")
    return [loss for loss in losses if loss is not None]


def _timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """The result, wall seconds, and CPU seconds of this process, which other programs disturb less."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = MODEL,
    data: Annotated[Path | None, typer.Option(help="JSONL of multiple-choice questions instead of our set.")] = None,
    items: Annotated[int, typer.Option(min=1, help="Texts.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per text, at most.")] = 24,
    answers: Annotated[bool, typer.Option("--answers", help="Score the answers only.")] = False,
    grid: Annotated[str, typer.Option(help="quick or full.")] = "quick",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time the naive and the prefix-shared alpha-scan on one model."""
    console = Console()
    folder = model
    if not (folder / "config.json").is_file():
        print(f"scan_cost: no checkpoint in {folder}; name one with --model or run `make setup`", file=sys.stderr)
        raise typer.Exit(2)
    if grid not in GRIDS or dtype not in DTYPES:
        raise typer.BadParameter("--grid is quick or full, --dtype is float32 or bfloat16")
    texts = (read_questions(data) if data else load_items())[:items]
    plan = make_plan(folder, texts, list(GRIDS[grid]), max_tokens=tokens, answers_only=answers)
    disable_progress_bar()
    view = LocalView.load(folder, DTYPES[dtype])
    scan = AlphaScan()

    naive_passes = (1 + len(plan.alphas) * view.num_blocks) * len(chunks(plan.model_copy(update={"alphas": []})))
    per_repeat = naive_passes + scan.steps(plan, view.num_blocks)
    seconds: list[tuple[float, float]] = []
    cpu_seconds: list[tuple[float, float]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, torch.inference_mode():
        for repeat in range(repeats):
            task = progress.add_task(f"repeat {repeat + 1} of {repeats}", total=per_repeat)
            advance = partial(progress.advance, task)
            (naive, naive_equivalents), slow, slow_cpu = _timed(lambda: naive_scan(view, plan, advance))  # noqa: B023
            reading, fast, fast_cpu = _timed(lambda: run_measurement(view, scan, plan, advance))  # noqa: B023
            seconds.append((slow, fast))
            cpu_seconds.append((slow_cpu, fast_cpu))

    ratios = [slow / fast for slow, fast in seconds]
    cpu_ratios = [slow / fast for slow, fast in cpu_seconds]
    of_losses, of_scores = largest_difference(reading, naive)
    figures = {
        "benchmark": "scan_cost",
        "model": folder.name,
        "dtype": dtype,
        "blocks": view.num_blocks,
        "grid": plan.alphas,
        "sequences": len(plan.tokens),
        "tokens": sum(len(row) for row in plan.tokens),
        "scored_tokens": sum(reading.scored_tokens),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "repeats": repeats,
        "naive_seconds": [slow for slow, _ in seconds],
        "shared_seconds": [fast for _, fast in seconds],
        "ratios": ratios,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "naive_cpu_seconds": [slow for slow, _ in cpu_seconds],
        "shared_cpu_seconds": [fast for _, fast in cpu_seconds],
        "cpu_ratios": cpu_ratios,
        "cpu_ratio_median": statistics.median(cpu_ratios),
        "naive_passes": naive_equivalents,
        "shared_passes": reading.passes,
        "passes_ratio": naive_equivalents / reading.passes,
        "largest_loss_difference_nats": of_losses,
        "largest_score_difference_nats": of_scores,
    }
    table = Table(title=f"alpha-scan of {folder.name}, {dtype}, {len(plan.tokens)} texts, {grid} grid")
    for heading in ("", "naive", "shared", "naive / shared"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "forward passes", f"{naive_equivalents:.1f}", f"{reading.passes:.1f}", f"{figures['passes_ratio']:.2f}"
    )
    for what, pairs in (("seconds", seconds), ("CPU seconds", cpu_seconds)):
        for number, (slow, fast) in enumerate(pairs, start=1):
            table.add_row(f"{what}, repeat {number}", f"{slow:.2f}", f"{fast:.2f}", f"{slow / fast:.2f}")
    for what, values in (("seconds", ratios), ("CPU seconds", cpu_ratios)):
        spread = f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        table.add_row(f"{what}, median (spread)", "", "", spread)
    console.print(table)
    console.print(f"largest difference: {of_losses:.1e} nats of a loss, {of_scores:.1e} nats of a score")
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
