"""What a scan costs: the naive 9-alpha scan against every strategy of the monitor, on one model, in one run.

Naive: the base loss and every block and alpha are a full pass of their own through all blocks.  The others share the
prefix in front of the scaled block, and leave out what they can (see `scan_strategies.py`).  All run in this process,
in turn, several times; ratios are taken within each repeat.
"""

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import checkpoints
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from scan_strategies import WAYS, Outcome, Ticks, largest_difference, naive_reading, naive_scan
from transformers.utils.logging import disable_progress_bar

from flipwatch.monitors.alpha_scan import FULL_GRID, AlphaScan, AlphaScanPlan, AlphaScanReading, chunks
from flipwatch.monitors.faults import FaultKind, FaultSpec, inject
from flipwatch.monitors.validation import ValidationItem, load_items
from flipwatch.probe.local import LocalView, make_plan

T = TypeVar("T")

Times = tuple[float, float]
"""Wall seconds, and CPU seconds of this process, which other programs disturb less."""


def read_questions(path: Path) -> list[ValidationItem]:
    """Multiple-choice questions as JSONL with `question`, `choices` and `answer`, the index of the right choice."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [ValidationItem(prompt=row["question"], answer=" " + row["choices"][row["answer"]]) for row in rows]


def damage_block(view: LocalView, block: int) -> None:
    """A burst of 18 values, 64 times the largest, in the block's up projection or its first matrix."""
    if not 0 <= block < view.num_blocks:
        raise typer.BadParameter(f"--damage {block}: the model's blocks are 0 to {view.num_blocks - 1}")
    matrices = {name: weight for name, weight in view.layers[block].named_parameters() if weight.dim() == 2}
    name = next((name for name in matrices if "up_proj" in name), next(iter(matrices)))
    with torch.no_grad():
        inject(FaultSpec(kind=FaultKind.BURST), matrices[name].data)


@dataclass
class Repeat:
    """Each way to scan, once."""

    naive: AlphaScanReading
    naive_times: Times
    outcomes: dict[str, Outcome]
    times: dict[str, Times]


def run_all(view: LocalView, order: AlphaScanPlan, progress: Progress, number: int) -> Repeat:
    """One repeat; the grid of `order` is that of the naive scan."""
    batches = len(chunks(order.model_copy(update={"alphas": []})))
    task = progress.add_task(f"{number}: naive", total=batches * (1 + len(order.alphas) * view.num_blocks))
    with torch.inference_mode():
        (losses, passes), naive_times = _timed(partial(naive_scan, view, order, partial(progress.advance, task)))
    repeat = Repeat(naive_reading(view, order, losses, passes), naive_times, {}, {})
    for name, way in WAYS.items():
        task = progress.add_task(f"{number}: {name}", total=0)
        ticks = Ticks(partial(_grow, progress, task), partial(progress.advance, task))
        repeat.outcomes[name], repeat.times[name] = _timed(partial(way, view, order, ticks))
    return repeat


def figures_of(repeats: list[Repeat]) -> dict[str, Any]:
    """What the README's tables of keys name, but for what the model is."""
    naive = repeats[-1].naive
    return {
        "naive_seconds": [repeat.naive_times[0] for repeat in repeats],
        "naive_cpu_seconds": [repeat.naive_times[1] for repeat in repeats],
        "naive_passes": naive.passes,
        "naive_flagged": list(AlphaScan(max_faults=1).judge([naive]).flagged),
        "strategies": {name: _figures_of_one(repeats, name) for name in WAYS},
    }


def _figures_of_one(repeats: list[Repeat], name: str) -> dict[str, Any]:
    wall, cpu = zip(*(repeat.times[name] for repeat in repeats), strict=True)
    ratios = [repeat.naive_times[0] / repeat.times[name][0] for repeat in repeats]
    cpu_ratios = [repeat.naive_times[1] / repeat.times[name][1] for repeat in repeats]
    outcome = repeats[-1].outcomes[name]
    off = max(largest_difference(repeat.outcomes[name].readings, repeat.naive) for repeat in repeats)
    return {
        "seconds": wall,
        "cpu_seconds": cpu,
        "ratios": ratios,
        "ratio_median": statistics.median(ratios),
        "cpu_ratios": cpu_ratios,
        "cpu_ratio_median": statistics.median(cpu_ratios),
        "passes": outcome.passes,
        "predicted_passes": outcome.predicted_passes,
        "passes_ratio": repeats[-1].naive.passes / outcome.passes,
        "scanned_sequences": outcome.finding.sequences,
        "flagged": outcome.finding.flagged,
        "largest_loss_difference_nats": off if math.isfinite(off) else None,
    }


def table_of(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    what = f"{figures['model']}, {figures['dtype']}, {figures['sequences']} texts, {figures['tokens']} tokens"
    table = Table(title=f"alpha-scan of {what}, {figures['threads']} threads, {figures['repeats']} repeats")
    for heading in ("", "passes", "predicted", "s", "CPU s", "naive / it, s", "CPU s", "flagged", "off by nats"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "naive",
        f"{figures['naive_passes']:.1f}",
        "",
        f"{statistics.median(figures['naive_seconds']):.1f}",
        f"{statistics.median(figures['naive_cpu_seconds']):.1f}",
        "",
        "",
        _blocks(figures["naive_flagged"]),
        "",
    )
    for name, of_one in figures["strategies"].items():
        table.add_row(
            name,
            f"{of_one['passes']:.1f}",
            f"{of_one['predicted_passes']:.1f}",
            f"{statistics.median(of_one['seconds']):.1f}",
            f"{statistics.median(of_one['cpu_seconds']):.1f}",
            _spread(of_one["ratios"]),
            _spread(of_one["cpu_ratios"]),
            _blocks(of_one["flagged"]),
            "not finite" if (off := of_one["largest_loss_difference_nats"]) is None else f"{off:.0e}",
        )
    return table


def _grow(progress: Progress, task: TaskID, steps: int) -> None:
    progress.update(task, total=(progress.tasks[task].total or 0) + steps)


def _timed(work: Callable[[], T]) -> tuple[T, Times]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, (time.perf_counter() - wall, time.process_time() - cpu)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _blocks(flagged: list[int]) -> str:
    return ", ".join(str(block) for block in flagged) or "none"


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = checkpoints.MODEL,
    data: Annotated[Path | None, typer.Option(help="JSONL of multiple-choice questions instead of our set.")] = None,
    items: Annotated[int, typer.Option(min=1, help="Texts; below 8 nothing can be flagged.")] = 12,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per text, at most.")] = 8,
    answers: Annotated[bool, typer.Option("--answers", help="Score the answers only.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    damage: Annotated[int | None, typer.Option(help="Damage this block first: a burst of 18 values.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time the naive alpha-scan and the monitor's strategies on one model."""
    checkpoints.require("scan_cost", model, dtype)
    texts = (read_questions(data) if data else load_items())[:items]
    order = make_plan(model, texts, list(FULL_GRID), max_tokens=tokens, answers_only=answers)
    disable_progress_bar()
    view = LocalView.load(model, checkpoints.DTYPES[dtype])
    if damage is not None:
        damage_block(view, damage)

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        done = [run_all(view, order, progress, number) for number in range(1, repeats + 1)]

    figures = {
        "benchmark": "scan_cost",
        "model": model.name,
        "dtype": dtype,
        "blocks": view.num_blocks,
        "damaged_block": damage,
        "sequences": len(order.tokens),
        "tokens": order.pass_tokens,
        "scored_tokens": sum(order.scored_tokens),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "repeats": repeats,
        **figures_of(done),
    }
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(table_of(figures))
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
