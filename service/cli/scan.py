"""`flipwatch scan`: one scan now."""

import math
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .client import CliError, Json, Refused, Sidecar
from .show import console, number, print_json, table

_EXIT = {"ok": 0, "degraded": 1, "failed": 1}


def scan(
    grid: Annotated[
        str | None, typer.Option(help="quick, full, or alphas like 0,0.7,1.3; default: the sidecar's setting.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scan with its finding as JSON.")] = False,
) -> None:
    """Scan the live model now, or wait for the scan that runs. Exit code 0: ok, 1: a finding, 2: cannot tell."""
    body: Json = {} if grid is None else {"grid": parse_grid(grid)}
    with Sidecar() as sidecar:
        accepted = _start_or_join(sidecar, body)
        done = _follow(sidecar, f"/v1/scans/{accepted['id']}", quiet=as_json)
    if as_json:
        print_json(done)
    if done["state"] != "done":
        raise CliError(f"The scan could not be done: {done['error'] or 'no reason was given'}")
    finding = done["finding"]
    if not as_json:
        _print(finding)
    raise typer.Exit(_EXIT.get(finding["health"], 2))


def parse_grid(text: str) -> str | list[float]:
    """`quick`, `full`, or a list of alphas."""
    if text in ("quick", "full"):
        return text
    try:
        alphas = [float(alpha) for alpha in text.split(",")]
    except ValueError:
        alphas = [math.nan]
    if not all(map(math.isfinite, alphas)):
        raise CliError(f"The grid {text!r} is neither quick, full, nor numbers with commas like 0,0.7,1.3.")
    return alphas


def _start_or_join(sidecar: Sidecar, body: Json) -> Json:
    """A new scan; without a wish for a grid, the one that runs is as good."""
    try:
        return sidecar.post("/v1/scans", body)
    except Refused as refused:
        running = [scan for scan in sidecar.get("/v1/scans") if scan["state"] in ("queued", "running")]
        if refused.status != 409 or body or not running:
            raise
        Console(stderr=True).print("A scan runs already; waiting for its result.")
        joined: Json = running[0]
        return joined


def _follow(sidecar: Sidecar, path: str, *, quiet: bool) -> Json:
    """Wait until the scan has ended, with a bar on standard error when that is a terminal."""
    progress = Progress(
        TextColumn("scanning"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("scan", total=None)
        return sidecar.wait(
            path,
            lambda record: record["state"] in ("done", "failed"),
            lambda record: progress.update(task, completed=record["steps_done"], total=record["steps_total"]),
        )


def _print(finding: dict[str, Any]) -> None:
    out = console()
    out.print(f"{finding['health']}: {finding['reason']}")
    flagged = set(finding.get("flagged", []))
    rows = [block for block in finding.get("blocks", []) if block["block"] in flagged]
    if not rows:
        return
    shown = table("block", "skip gain", "z", "bss", "bss z", "slope", "slope z")
    for block in rows:
        shown.add_row(
            str(block["block"]),
            *(number(block[name]) for name in ("skip_gain", "skip_gain_z", "bss", "bss_z", "slope", "slope_z")),
        )
    out.print(shown)
