"""What Flipwatch costs the requests of a live vLLM: throughput, time to first token, inter-token latency.

Two servers run at the same time, one plain and one with Flipwatch.  vLLM's own benchmark client drives them in turn, in
short segments; each ratio is of two segments next to each other in time, in rotating order.  The sidecar is started
anew for every condition.  One line of JSON per pair, so that a run that is ended goes on where it was.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import checkpoints
import report
import serving_engine
import serving_report
import typer
from rich.console import Console
from serving_load import Shape, drive
from serving_servers import NAME, Sides, be_stoppable, sides

_OFF: dict[str, Any] = {name: {"every_minutes": None} for name in ("scan", "fingerprint", "canary")}


def _scanning(duty: float | None = None) -> dict[str, Any]:
    """One long scan from the start on.  A scan does not use the moments without requests: they belong to the others."""
    share = 0.02 if duty is None else duty
    pacing = {"duty": share, "idle_duty": share}
    return _OFF | {"scan": {"every_minutes": 1440.0, **pacing}}


CONDITIONS: dict[str, dict[str, Any] | None] = {
    # Plain against plain: what the machine makes of nothing.
    "nothing": None,
    "idle": _OFF,
    "scanning": _scanning(),
    "sweeping": _OFF | {"scan": {"every_minutes": None, "idle_duty": 0.02}, "fingerprint": {"every_minutes": 0.05}},
    "scanning at 0.05": _scanning(0.05),
    "scanning at 0.25": _scanning(0.25),
}

CLOSED = Shape(prompts=8, input_tokens=32, output_tokens=32, rate=math.inf, streams=8)
_RATES = (
    Shape(prompts=6, input_tokens=32, output_tokens=48, rate=1.0, streams=None),
    Shape(prompts=8, input_tokens=32, output_tokens=48, rate=2.0, streams=None),
)
# The throughput is what the noise of a machine hides first.
LOADS = [("closed loop", CLOSED)] * 5 + [(f"{shape.rate:g} per s", shape) for shape in _RATES]
"""Of one condition in one round."""

_console = Console(stderr=True, soft_wrap=True)


def pair_of(both: Sides, condition: str, shape: Shape, model: Path, number: int) -> dict[str, Any]:
    """Both segments of a pair, one after the other."""
    watched = "plain" if condition == "nothing" else "flipwatch"
    order = ("plain", watched) if number % 2 else (watched, "plain")
    first, second = (drive(both.urls[side], NAME, model, shape, seed=number) for side in order)
    plain, other = (first, second) if number % 2 else (second, first)
    return {"plain": plain, "watched": other}


def measure(model: Path, mode: str, work: Path, conditions: list[str], rounds: int, deadline: float) -> None:
    """Rounds over all conditions, as far as the time reaches."""
    file = work / f"{mode}.jsonl"
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(line["round"], line["condition"], line["number"]) for line in known}
    with sides(model, mode, work / "cache") as both, file.open("a", encoding="utf-8") as lines:
        for side in both.urls.values():
            # Not measured: the first requests of a server meet code that has not run yet.
            drive(side, NAME, model, CLOSED, seed=0)
        for number in range(rounds):
            turn = number % len(conditions)
            for condition in conditions[turn:] + conditions[:turn]:
                todo = [at for at in range(len(LOADS)) if (number, condition, at) not in done]
                if not todo or time.monotonic() > deadline:
                    continue
                for line in _pairs(both, condition, model, number, todo):
                    print(json.dumps(line), file=lines, flush=True)
                    if time.monotonic() > deadline:
                        break


def _pairs(both: Sides, condition: str, model: Path, number: int, todo: list[int]) -> Iterator[dict[str, Any]]:
    """The pairs of one condition in one round, by their numbers in `LOADS`."""
    settings = CONDITIONS[condition]
    with nullcontext() if settings is None else both.sidecar(settings) as sidecar:
        if sidecar is not None and condition != "idle":
            sidecar.wait_until(f"flipwatch_{'sweeps' if condition == 'sweeping' else 'scans'}_total", 1.0)
        for at in todo:
            name, shape = LOADS[at]
            began, before = time.monotonic(), (0.0, 0.0) if sidecar is None else sidecar.held()
            pair = pair_of(both, condition, shape, model, number + at)
            after = (0.0, 0.0) if sidecar is None else sidecar.held()
            parts, held = (now - earlier for now, earlier in zip(after, before, strict=True))
            common = {"round": number, "condition": condition, "number": at, "load": name}
            _console.print(f"{common}: {parts:.0f} parts, {held:.3f} s held")
            yield common | {"parts": parts, "held_seconds": held, "seconds": time.monotonic() - began} | pair


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = checkpoints.MODEL,
    work: Annotated[Path, typer.Option(help="For lines of JSON and compiled code.")] = Path(".cache/impact"),
    modes: Annotated[str, typer.Option(help="eager, compiled, or both with a comma.")] = "eager,compiled",
    only: Annotated[str, typer.Option(help="Conditions, with commas; all unless said.")] = ",".join(CONDITIONS),
    rounds: Annotated[int, typer.Option(min=1)] = 12,
    minutes: Annotated[float, typer.Option(help="End after so long; another run goes on.")] = 600.0,
    small: Annotated[bool, typer.Option("--small", help="One round of closed loop: a first look.")] = False,
    engines: Annotated[bool, typer.Option(help="Also time decode steps of two engines in turn.")] = True,
    measuring: Annotated[bool, typer.Option("--measure/--report", help="Or only make the page again.")] = True,
    docs: Annotated[Path | None, typer.Option(help="Write the page and its figures here.")] = None,
) -> None:
    """Drive a plain and a watched server in turn, and say what watching costs."""
    be_stoppable()
    checkpoints.require("serving_impact", model, "bfloat16")
    work.mkdir(parents=True, exist_ok=True)
    wanted = only.split(",")
    deadline = time.monotonic() + 60.0 * minutes
    for mode in modes.split(",") if measuring else []:
        if engines:
            bursts = 10 if small else 200
            result = serving_engine.compare(model, mode, batch=8, bursts=bursts, steps=12, cache=work / "cache")
            (work / f"engine-{mode}.json").write_text(json.dumps(result), encoding="utf-8")
        measure(model, mode, work, wanted, 1 if small else rounds, deadline)
    figures = serving_report.figures_of(work, modes.split(","))
    tables = serving_report.tables_of(figures)
    report.publish(figures, tables, report.page(serving_report.HEAD, tables), None, docs)


if __name__ == "__main__":
    typer.run(main)
