"""`flipwatch mitigate`: change the served model, and take the change back."""

import json
import math
from typing import Annotated

import typer

from ...monitors.fingerprint.facts import ChunkRepair
from ..repair_words import place
from .client import CliError, Json, Sidecar
from .show import AsJson, console, number, print_json, print_records

app = typer.Typer(
    help="Skip or attenuate blocks of the served model, repair its weights, or drain it; and undo it.",
    no_args_is_help=True,
)

Blocks = Annotated[list[int] | None, typer.Argument(help="Zero-based blocks.")]
Flagged = Annotated[bool, typer.Option("--flagged", help="The blocks that the last scan flagged.")]
Reason = Annotated[str | None, typer.Option(help="Why; goes into the audit log.")]
Force = Annotated[bool, typer.Option("--force", help="Even if the last scan says that the loss would rise.")]
Id = Annotated[str, typer.Argument(help="Id of the mitigation, from `flipwatch mitigate list`.")]

_COLUMNS = ("id", "state", "action", "blocks", "alpha", "loss before", "loss after", "message")
# Before it answers, the sidecar looks at all weights.
_SWEEP_SECONDS = 900.0

_MOVING = ("pending", "applying", "verifying", "reverting")


@app.command()
def skip(
    blocks: Blocks = None,
    flagged: Flagged = False,
    reason: Reason = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Leave blocks out of the served model."""
    _apply({"action": "skip", "blocks": _which(blocks, flagged), "force": force}, reason, as_json)


@app.command()
def attenuate(
    alpha: Annotated[float, typer.Option(help="Factor on what the block adds: 1 is normal, 0 is left out.")],
    blocks: Blocks = None,
    flagged: Flagged = False,
    reason: Reason = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Scale what blocks add to the residual stream."""
    if not math.isfinite(alpha):
        raise CliError(f"Invalid value for --alpha: {alpha} is no number that a block can be scaled by.")
    _apply({"action": "attenuate", "blocks": _which(blocks, flagged), "alpha": alpha, "force": force}, reason, as_json)


@app.command()
def repair(blocks: Blocks = None, flagged: Flagged = False, reason: Reason = None, as_json: AsJson = False) -> None:
    """Put right what has changed in the weights, in these blocks or anywhere, and end the skip of such a block."""
    if blocks and flagged:
        raise CliError("Name the blocks, or give --flagged; not both.")
    which = {"blocks": _which(blocks, flagged)} if blocks or flagged else {}
    _apply({"action": "repair", **which}, reason, as_json, seconds=_SWEEP_SECONDS)


@app.command()
def drain(reason: Reason = None, as_json: AsJson = False) -> None:
    """Let the sidecar's /readyz answer 503, so that no new requests come; nothing in vLLM is touched."""
    _apply({"action": "drain"}, reason, as_json)


@app.command()
def undo(mitigation: Id, as_json: AsJson = False) -> None:
    """Set the gates of a mitigation's blocks to 1, so that they run as always, or end a drain."""
    with Sidecar() as sidecar:
        sidecar.delete(f"/v1/mitigations/{mitigation}")
        record = _settled(sidecar, mitigation)
    _tell(record, as_json, wanted=("reverted",))


@app.command()
def finish(mitigation: Id, as_json: AsJson = False) -> None:
    """Carry on a mitigation that was interrupted by the end of a sidecar."""
    with Sidecar() as sidecar:
        sidecar.post(f"/v1/mitigations/{mitigation}/finish", {})
        record = _settled(sidecar, mitigation)
    _tell(record, as_json, wanted=("active", "repaired"))


@app.command()
def show(mitigation: Id, as_json: AsJson = False) -> None:
    """Show one mitigation."""
    with Sidecar() as sidecar:
        record = sidecar.get(f"/v1/mitigations/{mitigation}")
    if as_json:
        print_json(record)
        return
    for name, value in record.items():
        if name != "repairs":
            console().print(f"{name:<18} {value}", markup=False)
    _print_repairs(record)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List mitigations, newest first."""
    with Sidecar() as sidecar:
        records = sidecar.get("/v1/mitigations")
    print_records(records, as_json, _COLUMNS, _row)


def _row(record: Json) -> list[str]:
    return [
        record["id"],
        record["state"],
        record["action"],
        ",".join(map(str, record["blocks"])),
        number(record["alpha"], 2),
        _loss(record, "before"),
        _loss(record, "after"),
        record["message"],
    ]


def _which(blocks: list[int] | None, flagged: bool) -> list[int] | str:
    if bool(blocks) == flagged:
        raise CliError("Name the blocks, or give --flagged; one of the two.")
    return "flagged" if flagged else list(blocks or [])


def _apply(body: Json, reason: str | None, as_json: bool, seconds: float | None = None) -> None:
    with Sidecar() as sidecar:
        accepted = sidecar.post("/v1/mitigations", body if reason is None else {**body, "reason": reason}, seconds)
        record = _settled(sidecar, accepted["id"])
    _tell(record, as_json, wanted=("active", "repaired", "dry_run"))


def _settled(sidecar: Sidecar, mitigation: str) -> Json:
    return sidecar.wait(f"/v1/mitigations/{mitigation}", lambda record: record["state"] not in _MOVING)


def _tell(record: Json, as_json: bool, wanted: tuple[str, ...]) -> None:
    if as_json:
        print_json(record)
    else:
        _print_repairs(record)
    if record["state"] not in wanted:
        raise CliError(f"The mitigation {record['id']} ended as {record['state']}: {record['message']}")
    if not as_json:
        console().print(f"{record['id']} {record['state']}: {record['message']}", markup=False)


def _print_repairs(record: Json) -> None:
    """A line for each chunk of a repair: how it was put right, or why not, and what had happened to it."""
    for body in record["repairs"]:
        repair = ChunkRepair.model_validate_json(json.dumps(body))
        how = repair.method.value if repair.method is not None else "intact" if repair.intact else "not repaired"
        what = "; ".join(diagnosis.sentence() for diagnosis in repair.diagnoses) or "what changed is not known"
        why = "" if repair.reason is None else f" ({repair.reason})"
        console().print(f"{how:<12} {place(repair)}: {what}{why}", markup=False)


def _loss(record: Json, when: str) -> str:
    state = record[f"loss_{when}_state"]
    return "not finite" if state == "not_finite" else number(record[f"loss_{when}"])
