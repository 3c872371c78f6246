"""`flipwatch inject`: damage the live model on purpose, for drills, and take the damage back."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ...monitors.faults import FaultKind
from .client import CliError, Json, Sidecar
from .show import AsJson, console, print_json, print_records

app = typer.Typer(
    help="Damage weights in memory, for drills; needs the switch at the probe and at the sidecar.",
    no_args_is_help=True,
)

_COLUMNS = ("id", "block", "tensor", "kind", "count", "seed")


@app.command()
def fault(
    place: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BLOCK] TENSOR",
            help="Block and tensor inside it, e.g. 4 mlp.up_proj; a tensor outside the blocks alone, e.g. lm_head.",
        ),
    ] = None,
    kind: Annotated[FaultKind | None, typer.Option(help="What happens to the values; burst unless told.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="How many values; 18 unless told.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which values: the same seed damages the same ones.")] = None,
    bit: Annotated[
        int | None, typer.Option(help="Kind bit: which, from the lowest; else the top exponent bit.")
    ] = None,
    factor: Annotated[
        float | None, typer.Option(help="Kinds burst, neighbours and scale: times the largest magnitude.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Kind stale: the tensor that the page is copied from.")] = None,
    engine: Annotated[int | None, typer.Option(min=0, help="Data parallelism: in this engine alone.")] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Instead of all that: JSON of a fault, or a list, as the API takes it; - is stdin."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Damage values of one tensor, or all that a file says."""
    options = {
        "kind": kind,
        "count": count,
        "seed": seed,
        "bit": bit,
        "factor": factor,
        "source": source,
        "engine": engine,
    }
    given: Json = {name: value for name, value in options.items() if value is not None}
    if spec is not None:
        if place or given:
            raise CliError("Give a place and options, or --spec, one of the two.")
        orders = _read(spec)
    else:
        orders = [{"kind": FaultKind.BURST, **given, **_placed(place or [])}]
    with Sidecar() as sidecar:
        made = _inject(sidecar, orders)
    if as_json:
        print_json(made if spec is not None else made[0])
        return
    for one in made:
        also = f", which is also {', '.join(one['shared_with'])}" if one["shared_with"] else ""
        line = f"{one['id']}: {one['kind']} in {one['count']} values of {one['tensor']}{also}"
        console().print(line, markup=False)


@app.command()
def undo(fault_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the fault.")]) -> None:
    """Put the damaged values back, bit for bit."""
    with Sidecar() as sidecar:
        sidecar.delete(f"/v1/faults/{fault_id}")
    console().print(f"{fault_id} undone", markup=False)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the faults that are in the model now."""
    with Sidecar() as sidecar:
        faults = sidecar.get("/v1/faults")
    print_records(faults, as_json, _COLUMNS, lambda made: ["-" if made[n] is None else str(made[n]) for n in _COLUMNS])


def _placed(words: list[str]) -> Json:
    """Block and tensor of an order."""
    match words:
        case [tensor] if not tensor.isdecimal():
            return {"tensor": tensor}
        case [block, tensor] if block.isdecimal():
            return {"block": int(block), "tensor": tensor}
    raise CliError("Name a block and a tensor inside it, or a tensor outside the blocks: 4 mlp.up_proj, or lm_head.")


def _read(spec: Path) -> list[Json]:
    """One order or a list of them; what is in them is for the sidecar to judge."""
    try:
        text = sys.stdin.read() if spec == Path("-") else spec.read_text(encoding="utf-8")
        orders = json.loads(text)
    except OSError as error:
        raise CliError(f"{spec} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise CliError(f"{spec} cannot be read as JSON: {error}.") from None
    orders = orders if isinstance(orders, list) else [orders]
    if not orders or not all(isinstance(order, dict) for order in orders):
        raise CliError(f"{spec} must hold a fault as a JSON object, or a list of such.")
    return orders


def _inject(sidecar: Sidecar, orders: list[Json]) -> list[Json]:
    """All of them or none."""
    made: list[Json] = []
    try:
        for order in orders:
            made.append(sidecar.post("/v1/faults", order))
    except CliError:
        for one in reversed(made):
            with suppress(CliError):
                sidecar.delete(f"/v1/faults/{one['id']}")
        raise
    return made
