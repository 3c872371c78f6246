"""What Flipwatch costs the requests of a live vLLM: throughput, time to first token, inter-token latency.

Two servers run at the same time, one plain and one with Flipwatch.  vLLM's own benchmark client drives them in turn, in
short segments; each ratio is of two segments next to each other in time, in rotating order.  The sidecar is started
anew for every condition.  One line of JSON per pair, so that a run that is ended goes on where it was.
"""

import json
import math
import time
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

CLOSED = Shape(prompts=8, input_tokens=32, output_tokens=64, rate=math.inf, streams=8)
RATES = (
    Shape(prompts=6, input_tokens=32, output_tokens=48, rate=1.0, streams=None),
    Shape(prompts=8, input_tokens=32, output_tokens=48, rate=2.0, streams=None),
)
_CLOSED_PAIRS = 4
"""Of each round: the throughput is what the noise of a machine hides first."""
_console = Console(stderr=True, soft_wrap=True)


def pair_of(both: Sides, condition: str, shape: Shape, model: Path, number: int) -> dict[str, Any]:
    """Both segments of a pair, one after the other."""
    watched = "plain" if condition == "nothing" else "flipwatch"
    order = ("plain", watched) if number % 2 else (watched, "plain")
    found: list[dict[str, Any]] = []
    for side in order:
        used = both.cpu_seconds(side)
        segment = drive(both.urls[side], NAME, model, shape, seed=number)
        found.append(segment | {"cpu_seconds": both.cpu_seconds(side) - used})
    first, second = found
    plain, other = (first, second) if number % 2 else (second, first)
    return {"plain": plain, "watched": other}


def measure(model: Path, mode: str, work: Path, conditions: list[str], rounds: int, deadline: float) -> None:
    """Rounds over all conditions, as far as the time reaches."""
    shapes = [("closed loop", CLOSED)] * _CLOSED_PAIRS + [(f"{shape.rate:g} per s", shape) for shape in RATES]
    file = work / f"{mode}.jsonl"
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(line["round"], line["condition"]) for line in known}
    with sides(model, mode, work / "cache") as both, file.open("a", encoding="utf-8") as lines:
        for side in both.urls.values():
            # Not measured: the first requests of a server meet code that has not run yet.
            drive(side, NAME, model, CLOSED, seed=0)
        for number in range(rounds):
            turn = number % len(conditions)
            for condition in conditions[turn:] + conditions[:turn]:
                if (number, condition) in done:
                    continue
                if time.monotonic() > deadline:
                    return
                for line in _one(both, condition, shapes, model, number):
                    print(json.dumps(line), file=lines, flush=True)


def _one(
    both: Sides, condition: str, shapes: list[tuple[str, Shape]], model: Path, number: int
) -> list[dict[str, Any]]:
    settings = CONDITIONS[condition]
    made = []
    common = {"round": number, "condition": condition}
    if settings is None:
        return [
            common | {"load": name} | pair_of(both, condition, shape, model, number + at)
            for at, (name, shape) in enumerate(shapes)
        ]
    with both.sidecar(settings) as sidecar:
        if condition != "idle":
            sidecar.wait_until("flipwatch_sweeps_total" if condition == "sweeping" else "flipwatch_scans_total", 1.0)
        for at, (name, shape) in enumerate(shapes):
            began, before = time.monotonic(), sidecar.held()
            pair = pair_of(both, condition, shape, model, number + at)
            seconds = time.monotonic() - began
            parts, held = (after - earlier for after, earlier in zip(sidecar.held(), before, strict=True))
            made.append(common | {"load": name, "parts": parts, "held_seconds": held, "seconds": seconds} | pair)
            _console.print(f"{common} {name}: {parts:.0f} parts, {held:.3f} s held")
    return made


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
