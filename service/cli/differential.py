"""`flipwatch differential`: does every block compute what a clean model computes, and if not, which tensor?"""

from typing import Annotated

import typer
from pydantic import ValidationError

from ...monitors.alpha_scan import AlphaScan
from ...monitors.differential.facts import NAME
from ...monitors.differential.finding import BlockDivergence, DifferentialFinding, Effort, Location
from ...monitors.differential.reference import ReferenceKind
from ...monitors.fingerprint.judgement import NAME as FINGERPRINT
from .client import CliError, Json, Sidecar
from .finding_table import EXIT
from .follow import check_done, follow_scan, start_scan
from .show import AsJson, console, print_json, table
from .vouching import record_vouched, remove_vouched, show_vouched

app = typer.Typer(
    help="Hold every block against a clean one: its own recorded states, the checkpoint, or a healthy peer.",
    no_args_is_help=True,
)

_PATH = "/v1/recordings"
_ANY = (AlphaScan.name, FINGERPRINT, NAME)

_NEAREST = 3
"""So many blocks are shown when none departs."""


@app.command()
def scan(
    reference: Annotated[
        ReferenceKind | None, typer.Option(help="What to compare with; default: the sidecar's setting.")
    ] = None,
    all_blocks: Annotated[bool, typer.Option("--all", help="Show all blocks, also those that agree.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scan with its finding as JSON.")] = False,
) -> None:
    """Compare now. Exit code 0: ok, 1: a finding, 2: cannot tell."""
    body: Json = {"monitor": NAME} if reference is None else {"monitor": NAME, "reference": reference.value}
    with Sidecar() as sidecar:
        done = follow_scan(sidecar, start_scan(sidecar, "/v1/scans", body, behind=_ANY)["id"], quiet=as_json)
    if as_json:
        print_json(done)
    check_done(done)
    finding = done["finding"]
    if not as_json:
        console().print(f"{finding['health']}: {finding['reason']}", markup=False)
        _print(finding, all_blocks=all_blocks)
    raise typer.Exit(EXIT.get(finding["health"], 2))


@app.command()
def record(as_json: AsJson = False) -> None:
    """Record the states of the live model, known to be good, and compare it with them at once."""
    record_vouched(_PATH, "states", _size, behind=_ANY, as_json=as_json)


@app.command()
def show(as_json: AsJson = False) -> None:
    """Show whose states are recorded."""
    show_vouched(_PATH, "states", _size, as_json=as_json)


@app.command()
def remove() -> None:
    """Forget the recorded states."""
    remove_vouched(_PATH)


def _print(body: Json, *, all_blocks: bool) -> None:
    """The blocks, the located tensors, and what finding them took."""
    if "locations" not in body:
        return
    try:
        finding = DifferentialFinding.model_validate(body)
    except ValidationError:
        raise CliError("The sidecar is of another version: install the same Flipwatch here and there.") from None
    rows = finding.blocks if all_blocks else _notable(finding.blocks)
    if rows:
        _print_blocks(rows)
    hidden = len(finding.blocks) - len(rows)
    if hidden:
        console().print(f"{hidden} more block{'s' * (hidden > 1)} with --all")
    if finding.locations:
        _print_locations(finding.locations)
    if named := sorted({spot.tensor for spot in finding.locations if spot.tensor is not None}):
        console().print(
            "`flipwatch mitigate repair` puts changed weights right; where it finds nothing changed, they were wrong "
            f"when the baseline was taken: `flipwatch integrity correct {' '.join(named)} --reason TEXT` first.",
            markup=False,
            soft_wrap=True,
        )
    for sentence in finding.not_comparable:
        console().print(f"not comparable: {sentence}", markup=False)
    console().print(_told(finding.effort))


def _notable(blocks: tuple[BlockDivergence, ...]) -> list[BlockDivergence]:
    """Those that depart or cannot be told; where there are none, the few that lie furthest away."""
    odd = [block for block in blocks if block.departs is not False]
    return odd or sorted(blocks, key=lambda block: -(block.l2 or 0.0))[:_NEAREST]


def _print_blocks(blocks: tuple[BlockDivergence, ...] | list[BlockDivergence]) -> None:
    shown = table("block", "L2", "allowed", "1 - cosine", "L2 in the walk", "")
    for block in blocks:
        numbers = (block.l2, block.allowed, block.cosine, block.walk_l2)
        word = {True: "departs", False: "", None: "cannot be told"}[block.departs]
        shown.add_row(str(block.block), *map(_short, numbers), word)
    console().print(shown)


def _print_locations(locations: tuple[Location, ...]) -> None:
    shown = table("block", "sublayer", "module", "tensor", "changed", "first element", "bits", "comparisons")
    for location in locations:
        diagnosis = location.diagnosis
        first = None if diagnosis is None or not diagnosis.changes else diagnosis.changes[0]
        parts = f" ({', '.join(location.parts)})" if location.parts else ""
        shown.add_row(
            str(location.block),
            location.sublayer or "-",
            location.module or "-",
            f"{location.tensor}{parts}" if location.tensor is not None else "-",
            "-" if diagnosis is None else str(diagnosis.elements),
            "-" if first is None else str(first.element),
            "-" if first is None else ", ".join(map(str, first.bits)),
            str(location.comparisons),
        )
    console().print(shown)


def _told(effort: Effort) -> str:
    took = (
        f"comparisons: {effort.blocks} of blocks, {effort.sublayers} inside blocks, {effort.digests} of digests, "
        f"{effort.tensors} of tensors value by value"
    )
    return took if not effort.brute_force else f"{took}; brute force: {effort.brute_force} tensors"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _size(made: Json) -> str:
    return f"{made['sequences']} sequences, {made['tokens']} tokens, blocks alone on {made['prefix']}"
