"""`/v1/faults`: damage on purpose, for drills; off unless switched on here and at the probe."""

from fastapi import APIRouter, Response

from ...monitors.wire import Fault, FaultOrder
from ..body import BoundedRoute
from ..problem import Kind, ProblemError, responses
from ..records import Event
from ..sidecar import Sidecar
from .access import GUARDED, Admin, TheSidecar

router = APIRouter(prefix="/v1/faults", tags=["faults"], route_class=BoundedRoute)

_RESPONSES = responses(*GUARDED, Kind.NOT_FOUND, Kind.CONFLICT, Kind.INVALID, Kind.REFUSED_BY_VLLM, Kind.VLLM_AWAY)


@router.get("", operation_id="listFaults", responses=_RESPONSES)
async def list_faults(sidecar: TheSidecar, _: Admin) -> list[Fault]:
    """The faults that are in the model now."""
    _check_switch(sidecar)
    return (await sidecar.probe.facts()).faults


@router.post("", operation_id="injectFault", status_code=201, responses=_RESPONSES)
async def inject_fault(sidecar: TheSidecar, caller: Admin, response: Response, order: FaultOrder) -> Fault:
    """Damage one tensor of a block, or one outside the blocks, in memory only."""
    _check_switch(sidecar)
    fault = await sidecar.probe.inject(order)
    _record(sidecar, caller.name, "fault injected", fault.model_dump(mode="json"))
    response.headers["location"] = f"/v1/faults/{fault.id}"
    return fault


@router.delete("/{fault_id}", operation_id="undoFault", status_code=204, responses=_RESPONSES)
async def undo_fault(sidecar: TheSidecar, caller: Admin, fault_id: str) -> None:
    """Put the damaged values back, bit for bit."""
    _check_switch(sidecar)
    if fault_id not in {fault.id for fault in (await sidecar.probe.facts()).faults}:
        raise ProblemError(Kind.NOT_FOUND, f"There is no fault {fault_id}.")
    await sidecar.probe.heal(fault_id)
    _record(sidecar, caller.name, "fault undone", {"id": fault_id})


def _check_switch(sidecar: Sidecar) -> None:
    if not sidecar.settings.faults.enabled:
        raise ProblemError(
            Kind.FORBIDDEN, "Faults are off: set faults.enabled here and FLIPWATCH_FAULTS=1 at vLLM, for drills only."
        )


def _record(sidecar: Sidecar, actor: str, what: str, detail: dict[str, object]) -> None:
    sidecar.store.add_event(Event(at=sidecar.now(), actor=actor, what=what, detail=detail))
