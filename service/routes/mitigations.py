"""`/v1/mitigations`: changes of the served model, and their undoing."""

from fastapi import APIRouter, Response

from ..body import BoundedRoute
from ..problem import Kind, ProblemError, responses
from ..records import MitigationAction, MitigationRecord
from ..schemas import Accepted, MitigationOrder
from ..sidecar import Sidecar
from . import access
from .access import GUARDED, READING, Limit, Reader, TheSidecar
from .orders import damaged, drain, flagged, follow

router = APIRouter(prefix="/v1/mitigations", tags=["mitigations"], route_class=BoundedRoute)

_CHANGES = responses(
    *GUARDED, Kind.NOT_FOUND, Kind.UNKNOWN_BLOCK, Kind.CONFLICT, Kind.INVALID, Kind.REFUSED_BY_VLLM, Kind.VLLM_AWAY
)


@router.get("", operation_id="listMitigations", responses=responses(*GUARDED, Kind.INVALID), openapi_extra=READING)
async def list_mitigations(sidecar: TheSidecar, _: Reader, limit: Limit = 100) -> list[MitigationRecord]:
    """The last mitigations, newest first."""
    return sidecar.store.mitigations(limit)


@router.post("", operation_id="startMitigation", status_code=202, responses=_CHANGES)
async def start_mitigation(
    sidecar: TheSidecar, caller: access.Mitigator, response: Response, order: MitigationOrder
) -> Accepted:
    """Skip or attenuate blocks of the served model, or repair its weights, without a restart or a lost request.

    Or drain it: /readyz answers 503 until that is undone or vLLM is a new process.

    409 when the last scan says that the loss would rise, unless the order says `force`; for a repair, which looks at
    all weights before it answers, when nothing has changed.  A repair of a block that is skipped ends the skip.
    """
    action = MitigationAction(order.action)
    if action is MitigationAction.DRAIN:
        return await _accepted(sidecar, drain(sidecar, reason=order.reason, actor=caller.name), response)
    if action is MitigationAction.REPAIR:
        record = await sidecar.mitigator.repair(
            damaged(sidecar) if order.blocks == "flagged" else order.blocks, reason=order.reason, actor=caller.name
        )
        return await _accepted(sidecar, record, response)
    if action is MitigationAction.ATTENUATE and order.alpha is None:
        raise ProblemError(Kind.INVALID, "body.alpha: attenuate needs an alpha above 0, up to 2, and not 1.")
    record = await sidecar.mitigator.apply(
        action,
        flagged(sidecar) if order.blocks == "flagged" else list(order.blocks or ()),
        alpha=order.alpha or 0.0,
        reason=order.reason,
        actor=caller.name,
        force=order.force,
    )
    return await _accepted(sidecar, record, response)


@router.get(
    "/{mitigation_id}",
    operation_id="getMitigation",
    responses=responses(*GUARDED, Kind.NOT_FOUND),
    openapi_extra=READING,
)
async def get_mitigation(sidecar: TheSidecar, _: Reader, mitigation_id: str) -> MitigationRecord:
    """One mitigation."""
    record = sidecar.store.mitigation(mitigation_id)
    if record is None:
        raise ProblemError(Kind.NOT_FOUND, f"There is no mitigation {mitigation_id}.")
    return record


@router.delete("/{mitigation_id}", operation_id="undoMitigation", status_code=202, responses=_CHANGES)
async def undo_mitigation(
    sidecar: TheSidecar, caller: access.Mitigator, response: Response, mitigation_id: str
) -> Accepted:
    """Set the gates of its blocks to 1, so that they run as always, or end a drain; allowed in every mode.

    409 for a repair.
    """
    record = await sidecar.mitigator.undo(mitigation_id, actor=caller.name)
    return await _accepted(sidecar, record, response)


@router.post("/{mitigation_id}/finish", operation_id="finishMitigation", status_code=202, responses=_CHANGES)
async def finish_mitigation(
    sidecar: TheSidecar, caller: access.Mitigator, response: Response, mitigation_id: str
) -> Accepted:
    """Carry on a mitigation that was interrupted by the end of a sidecar."""
    record = await sidecar.mitigator.finish(mitigation_id, actor=caller.name)
    return await _accepted(sidecar, record, response)


async def _accepted(sidecar: Sidecar, record: MitigationRecord, response: Response) -> Accepted:
    await follow(sidecar, record, response)
    return Accepted(id=record.id, state=record.state)
