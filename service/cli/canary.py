"""`flipwatch canary`: are a few fixed prompts answered as they should be?"""

from typing import Annotated

import typer

from ...monitors.canary.finding import NAME
from .client import Json, Sidecar
from .finding_table import EXIT
from .follow import check_done, follow_scan, start_scan
from .show import AsJson, console, print_json
from .vouching import record_vouched, remove_vouched, show_vouched

app = typer.Typer(
    help="Ask a few fixed prompts through the server's own API, and hold the answers against expected ones.",
    no_args_is_help=True,
)

_PATH = "/v1/canary"


@app.command()
def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print the scan with its finding as JSON.")] = False,
) -> None:
    """Ask now. Exit code 0: ok, 1: a finding, 2: cannot tell."""
    with Sidecar() as sidecar:
        accepted = start_scan(sidecar, "/v1/scans", {"monitor": NAME}, behind=(NAME,))
        done = follow_scan(sidecar, accepted["id"], quiet=as_json)
    if as_json:
        print_json(done)
    check_done(done)
    finding = done["finding"]
    if not as_json:
        console().print(f"{finding['health']}: {finding['reason']}", markup=False)
    raise typer.Exit(EXIT.get(finding["health"], 2))


@app.command()
def record(as_json: AsJson = False) -> None:
    """Record the answers of the live model, known to be good: they are what is expected from now on."""
    record_vouched(_PATH, "answers", _size, behind=(NAME,), as_json=as_json)


@app.command()
def show(as_json: AsJson = False) -> None:
    """Show whose answers are recorded."""
    show_vouched(_PATH, "answers", _size, as_json=as_json)


@app.command()
def remove() -> None:
    """Forget the recorded answers."""
    remove_vouched(_PATH)


def _size(made: Json) -> str:
    return (
        f"{made['prompts']} prompts, {sum(made['tokens'])} tokens, asked {made['runs']} times, scatter "
        f"{made['scatter']:.3g}, allowed {made['tolerance']:.3g}"
    )
