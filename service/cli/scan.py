"""`flipwatch scan`: one scan now, of the live model through the sidecar or of a checkpoint folder in this process."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from ...monitors.alpha_scan import AlphaScan, AlphaScanFinding, Strategy
from ...monitors.differential.facts import NAME as DIFFERENTIAL
from ...monitors.fingerprint.judgement import NAME as FINGERPRINT
from .client import CliError, Json, Refused, Sidecar
from .finding_table import EXIT, Cost, naive_of, print_finding
from .follow import check_done, follow_scan, running_scan, start_scan
from .offline import Dtype, Options, Score, scan_folder
from .show import console, print_json, progress_bar


def scan(
    grid: Annotated[
        str | None,
        typer.Option(help="quick, full, or alphas like 0,0.7,1.3; default: the sidecar's setting; quick with --model."),
    ] = None,
    all_blocks: Annotated[bool, typer.Option("--all", help="Show all blocks, also the plain ones.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scan with its finding as JSON.")] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Scan the checkpoint in this folder, without a server; needs flipwatch\\[local]."
        ),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="With --model: precision; auto is the checkpoint's own.")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="With --model: texts used, 64 unless said.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="With --model: tokens used from a text, 64 unless said.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(help="With --model: JSONL with prompt and answer; default: the set that ships.")
    ] = None,
    score: Annotated[Score | None, typer.Option(help="With --model: which tokens count; default: all.")] = None,
    strategy: Annotated[
        Strategy | None, typer.Option(help="With --model: how the first round saves work; default: plain.")
    ] = None,
    max_faults: Annotated[
        int | None, typer.Option(min=1, help="With --model: most harmful blocks that are looked for, 3 unless said.")
    ] = None,
) -> None:
    """Scan the live model now, or wait for the scan that runs; with --model scan a checkpoint folder.

    Exit code 0: ok, 1: a finding, 2: cannot tell.
    """
    wanted: dict[str, Any] = {
        "grid": None if grid is None else parse_grid(grid),
        "dtype": dtype,
        "items": items,
        "max_tokens": max_tokens,
        "validation": validation,
        "score": score,
        "strategy": strategy,
        "max_faults": max_faults,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    if model is not None:
        code = _offline(model, Options(**given), all_blocks=all_blocks, as_json=as_json)
    else:
        own = [name for name in given if name != "grid"]
        if own:
            option = own[0].replace("_", "-")
            raise CliError(f"--{option} goes with --model only: a live model is scanned by the sidecar's settings.")
        code = _online(given, all_blocks=all_blocks, as_json=as_json)
    raise typer.Exit(code)


def _offline(folder: Path, options: Options, *, all_blocks: bool, as_json: bool) -> int:
    with progress_bar(quiet=as_json) as progress:
        finding, cost = scan_folder(folder, options, progress)
    if as_json:
        print_json({"model": str(folder), "finding": finding.model_dump(mode="json"), "cost": cost._asdict()})
    else:
        print_finding(finding, cost, all_blocks=all_blocks)
    return EXIT.get(finding.health, 2)


def _online(body: Json, *, all_blocks: bool, as_json: bool) -> int:
    with Sidecar() as sidecar:
        accepted = _start_or_join(sidecar, body)
        done = follow_scan(sidecar, accepted["id"], quiet=as_json)
    if as_json:
        print_json(done)
    check_done(done)
    finding = done["finding"]
    if not as_json:
        _print(done, all_blocks=all_blocks)
    return EXIT.get(finding["health"], 2)


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
        return start_scan(sidecar, "/v1/scans", body, behind=[FINGERPRINT, DIFFERENTIAL])
    except Refused as refused:
        running = running_scan(sidecar, [AlphaScan.name])
        if refused.status != 409 or body or running is None:
            raise
        Console(stderr=True).print("A scan runs already; waiting for its result.")
        return running


def _print(scan: Json, *, all_blocks: bool) -> None:
    body = scan["finding"]
    if body["monitor"] != AlphaScan.name or "blocks" not in body:
        console().print(f"{body['health']}: {body['reason']}", markup=False)
        return
    try:
        finding = AlphaScanFinding.model_validate(body)
    except ValidationError:
        raise CliError("The sidecar is of another version: install the same Flipwatch here and there.") from None
    seconds = scan["finished_at"] - scan["created_at"]
    print_finding(finding, Cost(finding.passes, naive_of(finding), seconds), all_blocks=all_blocks)
