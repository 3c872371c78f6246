"""`flipwatch inject`: damage the live model on purpose, for drills, and take the damage back."""

from typing import Annotated

import typer

from ...monitors.wire import FaultKind
from .client import Sidecar
from .show import AsJson, console, print_json, print_records

app = typer.Typer(
    help="Damage weights in memory, for drills; needs the switch at the probe and at the sidecar.",
    no_args_is_help=True,
)

_COLUMNS = ("id", "block", "tensor", "kind", "count", "seed")


@app.command()
def fault(
    block: Annotated[int, typer.Argument(help="Zero-based block.")],
    tensor: Annotated[str, typer.Argument(help="Tensor inside the block, e.g. mlp.up_proj.")],
    kind: Annotated[FaultKind, typer.Option(help="What happens to the values.")] = FaultKind.BURST,
    count: Annotated[int, typer.Option(min=1, help="How many values.")] = 18,
    seed: Annotated[int, typer.Option(help="Which values: the same seed damages the same ones.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Damage COUNT values of one tensor of one block."""
    order = {"block": block, "tensor": tensor, "kind": kind.value, "count": count, "seed": seed}
    with Sidecar() as sidecar:
        made = sidecar.post("/v1/faults", order)
    if as_json:
        print_json(made)
    else:
        console().print(f"{made['id']}: {made['kind']} in {made['count']} values of {made['tensor']}", markup=False)


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
    print_records(faults, as_json, _COLUMNS, lambda made: [str(made[name]) for name in _COLUMNS])
