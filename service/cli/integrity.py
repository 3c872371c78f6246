"""`flipwatch integrity`: are the served bytes those of the baseline, and where did they come from?"""

from typing import Annotated

import typer

from ...monitors.alpha_scan import AlphaScan
from ...monitors.differential.facts import NAME as DIFFERENTIAL
from ...monitors.fingerprint.judgement import NAME, size
from ...monitors.moment import utc
from .client import Json, Sidecar
from .finding_table import EXIT
from .follow import check_done, follow_scan, start_scan
from .show import AsJson, console, print_json, table

app = typer.Typer(
    help="Compare the served weights, bit for bit, with the baseline that was taken when they were loaded.",
    no_args_is_help=True,
)

_PATH = "/v1/integrity"
_ANY = (AlphaScan.name, NAME, DIFFERENTIAL)


@app.command()
def show(as_json: AsJson = False) -> None:
    """Show the baselines, the last sweep and the last check. Exit code 0: ok, 1: a finding, 2: cannot tell."""
    with Sidecar() as sidecar:
        integrity = sidecar.get(_PATH)
        state = next(state for state in sidecar.get("/v1/states")["states"] if state["monitor"] == NAME)
    if as_json:
        print_json({"integrity": integrity, "state": state})
    else:
        _print(integrity, state)
    raise typer.Exit(EXIT.get(state["health"], 2))


@app.command()
def sweep(as_json: AsJson = False) -> None:
    """Sweep the weights now. Exit code 0: ok, 1: a finding, 2: cannot tell."""
    _follow("/v1/scans", {"monitor": NAME}, as_json)


@app.command()
def record(
    reason: Annotated[str, typer.Option(help="What was changed on purpose; it is kept in the audit log.")],
    as_json: AsJson = False,
) -> None:
    """Take a new baseline, after a change on purpose (weight sync, adapters, wake-up); exit code as for sweep."""
    _follow(_PATH, {"reason": reason}, as_json)


@app.command()
def correct(
    tensors: Annotated[list[str], typer.Argument(help="Full names, as `flipwatch differential scan` shows them.")],
    reason: Annotated[str, typer.Option(help="Why the baseline is wrong; it is kept in the audit log.")],
    as_json: AsJson = False,
) -> None:
    """Take the checkpoint's values as the baseline of tensors that were wrong when it was taken.

    The served weights stay as they are: the sweep that follows shows them as changed, and `flipwatch mitigate repair`
    puts them right. Exit code as for sweep.
    """
    _follow(f"{_PATH}/corrections", {"tensors": tensors, "reason": reason}, as_json)


@app.command()
def check(as_json: AsJson = False) -> None:
    """Hold the checkpoint's files against the manifest, and memory against them; exit code as for sweep."""
    _follow(f"{_PATH}/checkpoint", {}, as_json, checkpoint=True)


def _follow(path: str, body: Json, as_json: bool, *, checkpoint: bool = False) -> None:
    with Sidecar() as sidecar:
        done = follow_scan(sidecar, start_scan(sidecar, path, body, behind=_ANY)["id"], quiet=as_json)
        integrity = sidecar.get(_PATH) if checkpoint and done["state"] == "done" else None
    if as_json:
        print_json(done if integrity is None else {**done, "verdict": integrity["verdict"]})
    check_done(done)
    finding = done["finding"]
    if not as_json:
        console().print(f"{finding['health']}: {finding['reason']}", markup=False)
        if integrity is not None:
            _print_check(integrity)
        _print_chunks(finding)
    raise typer.Exit(EXIT.get(finding["health"], 2))


def _print(integrity: Json, state: Json) -> None:
    out = console()
    out.print(f"{state['health']}: {state['reason']}", markup=False)
    if integrity["refusal"] is not None:
        out.print(f"no baselines: {integrity['refusal']}", markup=False)
    if integrity["ranks"]:
        shown = table("rank", "recorded", "chunks", "covered", "not covered", "parity", "digest")
        for seal in integrity["ranks"]:
            shown.add_row(
                str(seal["rank"]["rank"]),
                utc(seal["recorded_at"]),
                str(seal["chunks"]),
                size(seal["covered_bytes"]),
                f"{len(seal['not_covered'])} tensors" if seal["not_covered"] else "nothing",
                f"{size(seal['parity_bytes'])} ({seal['parity']})",
                seal["digest"],
            )
        out.print(shown)
    _print_check(integrity)


def _print_check(integrity: Json) -> None:
    out = console()
    verdict = integrity["verdict"]
    when = "" if verdict is None else f"{utc(verdict['at'])}, "
    out.print(f"checkpoint: {when}{integrity['summary']}", markup=False)
    for file in [] if verdict is None else verdict["files"]:
        out.print(f"{file['sha256']}  {file['file']}", markup=False)


def _print_chunks(finding: Json) -> None:
    """The bad chunks that the finding names; an unknown one may have none."""
    bad = finding.get("bad", [])
    if not bad:
        return
    shown = table("rank", "chunk", "tensors", "block", "parity")
    for chunk in bad:
        blocks = sorted({piece["block"] for piece in chunk["pieces"] if piece["block"] is not None})
        shown.add_row(
            str(chunk["rank"]),
            str(chunk["chunk"]),
            ", ".join(piece["tensor"] for piece in chunk["pieces"]),
            ", ".join(map(str, blocks)) or "-",
            "repairs it" if chunk["unrepairable"] is None else chunk["unrepairable"],
        )
    console().print(shown)
