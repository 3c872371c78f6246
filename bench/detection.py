"""How well the alpha-scan finds faults, and how often it cries wolf: measured on trained models.

Every fault and every healthy text goes through the quick scan of the local engine, and its readings are kept as one
line of JSON.  What is flagged, ranked first or missed is judged from the readings afterwards (`detection_report.py`),
so that rules and thresholds can be compared without measuring again.  A run that was ended goes on where it was.

    python bench/detection.py measure --model DIR --work DIR [--data mmlu.jsonl] [--small]
    python bench/detection.py report --work DIR --docs docs/detection
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import checkpoints
import detection_cases as cases
import torch
import typer
from detection_cases import Case
from detection_judge import clean_profile
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from scan_cost import read_questions
from scan_strategies import naive_reading, naive_scan
from transformers.utils.logging import disable_progress_bar

from flipwatch.monitors.alpha_scan import (
    FULL_GRID,
    QUICK_GRID,
    AlphaScan,
    AlphaScanPlan,
    AlphaScanReading,
    Profile,
    Strategy,
)
from flipwatch.monitors.alpha_scan.rounds import GROUP
from flipwatch.monitors.alpha_scan.scores import mean
from flipwatch.monitors.faults import inject
from flipwatch.monitors.strict import Wire
from flipwatch.monitors.validation import ValidationItem, load_items
from flipwatch.probe.local import LocalView, make_plan, run_measurement, run_scan

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)

SKIPPABLE_NATS = 0.5
"""A block is skippable when leaving it out of the healthy model costs at most so much."""

BUCKETS = (0.1, 0.5)
"""Borders of the classes of damage, in nats of loss."""

HEALTHY_CHUNK = 32


class Size(Wire):
    """How much is measured."""

    sequences: int
    """Each scan begins with so many, and grows while it is undecided."""
    most_sequences: int
    tokens: int
    healthy_texts: int
    seeds: int
    quota: tuple[int, int, int]
    """Scans per kind of fault and class of damage; faults beyond it are only counted."""
    outside_seeds: int
    several: int
    naive: int


SIZES = {
    "full": Size(
        sequences=8,
        most_sequences=16,
        tokens=16,
        healthy_texts=384,
        seeds=60,
        quota=(1, 1, 6),
        outside_seeds=2,
        several=6,
        naive=4,
    ),
    "small": Size(
        sequences=8,
        most_sequences=16,
        tokens=12,
        healthy_texts=96,
        seeds=3,
        quota=(1, 1, 2),
        outside_seeds=1,
        several=2,
        naive=1,
    ),
}


class Bench:
    """One model's results: what is there, and what is measured next."""

    def __init__(self, folder: Path, dtype: str, work: Path, size: Size, texts: list[ValidationItem]) -> None:
        self.folder, self.dtype, self.size = folder, dtype, size
        self.path = work / f"{folder.name}-{dtype}.jsonl"
        work.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.done: dict[str, dict[str, Any]] = {record["name"]: record for record in map(json.loads, lines)}
        self.view = LocalView.load(folder, checkpoints.DTYPES[dtype])
        self.texts = texts
        self.first = self.plan(texts[: size.sequences], list(QUICK_GRID))
        self.order = self.plan(texts[: size.most_sequences], list(QUICK_GRID))

    def plan(self, texts: list[ValidationItem], alphas: list[float], *, tokens_per_step: int = 512) -> AlphaScanPlan:
        """Sequences of the benchmark's length; shorter texts are kept as they are."""
        return make_plan(self.folder, texts, alphas, max_tokens=self.size.tokens, tokens_per_step=tokens_per_step)

    def keep(self, name: str, **content: Any) -> dict[str, Any]:
        """Append one line."""
        record = {"name": name, **content}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
        self.done[name] = record
        return record

    def header(self) -> None:
        """What the report needs to know of the model; the last one counts."""
        self.keep(
            "header",
            model=self.folder.name,
            dtype=self.dtype,
            architecture=type(self.view.model).__name__,
            blocks=self.view.num_blocks,
            order=self.first.model_dump(mode="json"),
            texts=len(self.texts),
            torch=torch.__version__,
            size=self.size.model_dump(mode="json"),
        )

    # The healthy model

    def healthy_order(self) -> None:
        """The texts of the faults' scans, twice: the second time in batches of another size, for the rounding."""
        self._scan("healthy/order", self.first)
        smaller = self.plan(self.texts[: self.size.sequences], list(QUICK_GRID), tokens_per_step=self.size.tokens * 6)
        self._scan("healthy/again", smaller)

    def healthy_texts(self) -> Iterator[str]:
        """The quick scan of all texts; scans of any subset are put together from it.

        The loss of a sequence does not depend on the other ones, but for rounding.
        """
        for start in range(0, len(self.texts), HEALTHY_CHUNK):
            name = f"healthy/texts/{start}"
            if name not in self.done:
                chunk = self.texts[start : start + HEALTHY_CHUNK]
                self._scan(name, self.plan(chunk, list(QUICK_GRID)))
            yield name

    def _scan(self, name: str, plan: AlphaScanPlan) -> None:
        started = time.perf_counter()
        reading = run_measurement(self.view, AlphaScan(), plan)
        self.keep(name, readings=[reading.model_dump(mode="json")], seconds=time.perf_counter() - started)

    def skippable(self) -> list[int]:
        """Blocks that the healthy model can do without."""
        reading = AlphaScanReading.model_validate(self.done["healthy/order"]["readings"][0])
        scores = AlphaScan().judge([reading]).blocks
        return [s.block for s in scores if s.skip_gain is not None and -s.skip_gain <= SKIPPABLE_NATS]

    def profile(self, plan: AlphaScanPlan) -> Profile | None:
        """The clean profile, for scans of its own texts only."""
        return clean_profile(self.done) if plan.tokens == self.first.tokens else None

    # Faults

    def faults(self, every: Iterator[Case], *, quota: bool, plan: AlphaScanPlan, groups: bool) -> Iterator[str]:
        """Scan case by case; yields the name of each."""
        counts: Counter[tuple[str, int]] = Counter()
        start = plan.model_copy(
            update={name: getattr(plan, name)[: self.size.sequences] for name in ("tokens", "scored_from")}
        )
        healthy = self._base(start)
        for case in every:
            record = self.done.get(case.name)
            if record is None:
                with damaged(self.view, case):
                    loss = self._base(start)
                    bucket = damage_class(healthy, loss)
                    scanned = not quota or counts[case.kind, bucket] < self.size.quota[bucket]
                    content: dict[str, Any] = {"case": case.model_dump(mode="json"), "healthy": healthy, "loss": loss}
                    if scanned:
                        started = time.perf_counter()
                        _, readings = run_scan(
                            self.view, AlphaScan(strategy=Strategy.GROWING), plan, self.profile(plan)
                        )
                        content["seconds"] = time.perf_counter() - started
                        content["readings"] = [reading.model_dump(mode="json") for reading in readings]
                        if groups and readings[0].complete:
                            together = start.model_copy(update={"group": GROUP, "alphas": [0.0]})
                            content["groups"] = run_measurement(self.view, AlphaScan(), together).model_dump(
                                mode="json"
                            )
                    record = self.keep(case.name, **content)
            if "readings" in record:
                counts[case.kind, damage_class(record["healthy"], record["loss"])] += 1
            yield case.name

    def _base(self, plan: AlphaScanPlan) -> float | None:
        """Loss as it is now; None when it is not finite."""
        reading = run_measurement(self.view, AlphaScan(), plan.model_copy(update={"alphas": []}))
        return mean(reading.base_nats, reading.scored_tokens)

    def naive(self, every: Iterator[Case]) -> Iterator[str]:
        """The naive 9-alpha scan of some faults that have curves, and the quick scan right behind it, in one run."""
        wanted = self.size.naive
        for case in every:
            record = self.done.get(case.name)
            if wanted == 0:
                return
            if record is None or "readings" not in record or record["loss"] is None:
                continue
            complete = AlphaScanReading.model_validate(record["readings"][0]).complete
            if not complete or damage_class(record["healthy"], record["loss"]) < 2:
                continue
            wanted -= 1
            name = f"naive/{case.name}"
            if name not in self.done:
                full = self.first.model_copy(update={"alphas": list(FULL_GRID)})
                with damaged(self.view, case), torch.inference_mode():
                    started = time.perf_counter()
                    losses, passes = naive_scan(self.view, full, lambda: None)
                    slow = time.perf_counter() - started
                    started = time.perf_counter()
                    quick = run_measurement(self.view, AlphaScan(), self.first)
                    fast = time.perf_counter() - started
                    started = time.perf_counter()
                    skips = self.first.model_copy(update={"alphas": [0.0]})
                    skip = run_measurement(self.view, AlphaScan(), skips)
                    fastest = time.perf_counter() - started
                self.keep(
                    name,
                    naive=naive_reading(self.view, full, losses, passes).model_dump(mode="json"),
                    naive_seconds=slow,
                    quick_seconds=fast,
                    naive_passes=passes,
                    quick_passes=quick.passes,
                    skip=skip.model_dump(mode="json"),
                    skip_seconds=fastest,
                    skip_passes=skip.passes,
                )
            yield name


@contextmanager
def damaged(view: LocalView, case: Case) -> Iterator[None]:
    """Within it the fault stands."""
    parameters = dict(view.model.named_parameters())
    undo: list[Callable[[], None]] = []
    try:
        with torch.inference_mode():
            for strike in case.strikes:
                source = None if strike.source is None else parameters[strike.source].data
                undo.append(inject(strike.spec, parameters[strike.tensor].data, source))
        yield
    finally:
        with torch.inference_mode():
            for back in reversed(undo):
                back()


def damage_class(healthy: float | None, loss: float | None) -> int:
    """0: below 0.1 nats, 1: 0.1 to 0.5, 2: above, or a loss that is not finite."""
    if loss is None or healthy is None:
        return 2
    return sum(loss - healthy >= border for border in BUCKETS)


@app.command()
def measure(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")],
    work: Annotated[Path, typer.Option(help="Folder for the readings, one JSONL per model and dtype.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    validation: Annotated[Path | None, typer.Option(help="JSONL of texts; default: the shipped set.")] = None,
    data: Annotated[Path | None, typer.Option(help="JSONL of multiple-choice questions, added to the texts.")] = None,
    small: Annotated[bool, typer.Option("--small", help="A run of some minutes.")] = False,
    healthy_only: Annotated[bool, typer.Option("--healthy-only", help="No faults.")] = False,
    healthy_texts: Annotated[int | None, typer.Option(min=8, help="So many texts at most.")] = None,
    minutes: Annotated[float, typer.Option(help="Begin nothing new after that.")] = 600.0,
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Measure what is not measured yet."""
    checkpoints.require("detection", model, dtype)
    torch.set_num_threads(threads)
    disable_progress_bar()
    size = SIZES["small" if small else "full"]
    own = load_items(validation)
    more = read_questions(data) if data else []
    random.Random(0).shuffle(more)  # noqa: S311 - reproducible, not secret
    texts = (own + more)[: healthy_texts or size.healthy_texts]
    bench = Bench(model, dtype, work, size, texts)
    until = time.monotonic() + 60 * minutes
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bench.header()
        task = progress.add_task("healthy", total=None)
        if "healthy/order" not in bench.done:
            bench.healthy_order()
        for name in _all(bench, healthy_only):
            progress.update(task, description=name[:48], advance=1)
            if time.monotonic() > until:
                return


def _all(bench: Bench, healthy_only: bool) -> Iterator[str]:
    """Everything, a part of each sort first."""
    view, order, size = bench.view, bench.order, bench.size
    if healthy_only:
        yield from bench.healthy_texts()
        return
    skippable = bench.skippable()
    short = order.model_copy(
        update={"alphas": [0.0], "tokens": [row[:12] for row in order.tokens[:4]], "scored_from": order.scored_from[:4]}
    )
    skips = bench.first.model_copy(update={"alphas": [0.0]})
    first = max(3, size.seeds // 12)
    yield from bench.faults(cases.singles(view, order, first), quota=True, plan=order, groups=True)
    yield from bench.faults(cases.not_finite(view, skippable, size.several), quota=False, plan=short, groups=False)
    yield from bench.faults(cases.outside(view, size.outside_seeds), quota=False, plan=skips, groups=False)
    yield from bench.faults(cases.several(view, skippable, size.several), quota=False, plan=skips, groups=False)
    yield from bench.naive(cases.singles(view, order, first))
    yield from bench.healthy_texts()
    yield from bench.faults(cases.singles(view, order, size.seeds), quota=True, plan=order, groups=True)


@app.command()
def report(
    work: Annotated[Path, typer.Option(help="Folder of the readings.")],
    docs: Annotated[Path, typer.Option(help="Where the table, the JSON and the plots go.")],
) -> None:
    """Judge what was measured: table, JSON, plots."""
    from detection_report import write

    write(work, docs)


if __name__ == "__main__":
    app()
