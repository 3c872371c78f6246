"""`/v1/integrity`: the bytes of the served model, their baseline, and the checkpoint that they came from."""

from fastapi import APIRouter, Response

from ..body import BoundedRoute
from ..problem import Kind, ProblemError, responses
from ..records import Event, ScanTrigger
from ..schemas import Accepted, CorrectionOrder, IntegrityView, RecordOrder
from . import access
from .access import GUARDED, READING, Admin, Reader, TheSidecar

router = APIRouter(prefix="/v1/integrity", tags=["integrity"], route_class=BoundedRoute)

_STARTS = responses(*GUARDED, Kind.CONFLICT, Kind.INVALID, Kind.REFUSED_BY_VLLM, Kind.VLLM_AWAY)


@router.get(
    "",
    operation_id="getIntegrity",
    responses=responses(*GUARDED, Kind.NOT_FOUND, Kind.CONFLICT, Kind.INVALID, Kind.REFUSED_BY_VLLM, Kind.VLLM_AWAY),
    openapi_extra=READING,
)
async def get_integrity(sidecar: TheSidecar, _: Reader) -> IntegrityView:
    """The baselines of all ranks as the probe has them now, and the last check of the checkpoint."""
    if not sidecar.live.up:
        raise ProblemError(Kind.VLLM_AWAY, sidecar.live.away)
    facts = await sidecar.probe.integrity()
    verdict = sidecar.live.integrity.verdict
    if verdict is not None and verdict.boot_id != facts.boot_id:
        verdict = None
    return IntegrityView(
        boot_id=facts.boot_id,
        refusal=facts.refusal,
        ranks=facts.ranks,
        verdict=verdict,
        verified=None if verdict is None else verdict.verified,
        summary="The checkpoint was not checked." if verdict is None else f"{verdict.sentence}.",
    )


@router.post("", operation_id="recordIntegrity", status_code=202, responses=_STARTS)
async def record_integrity(sidecar: TheSidecar, caller: Admin, response: Response, order: RecordOrder) -> Accepted:
    """Take a new baseline of the weights, because they were changed on purpose (weight sync, adapters, wake-up)."""
    await sidecar.watcher.look()
    record = sidecar.runner.start(sidecar.sweeps.record(order.reason, caller.name))
    detail = {"scan_id": record.id, "reason": order.reason}
    sidecar.store.add_event(Event(at=sidecar.now(), actor=caller.name, what="fingerprint asked for", detail=detail))
    response.headers["location"] = f"/v1/scans/{record.id}"
    return Accepted(id=record.id, state=record.state)


@router.post("/corrections", operation_id="correctIntegrity", status_code=202, responses=_STARTS)
async def correct_integrity(sidecar: TheSidecar, caller: Admin, response: Response, order: CorrectionOrder) -> Accepted:
    """The baseline of these tensors was wrong: take the checkpoint's values for it.

    The served weights stay as they are; the sweep that follows says that they differ, and a repair puts them right.
    """
    await sidecar.watcher.look()
    record = sidecar.runner.start(sidecar.sweeps.correct(order.tensors, order.reason, caller.name))
    detail = {"scan_id": record.id, **order.model_dump()}
    sidecar.store.add_event(Event(at=sidecar.now(), actor=caller.name, what="correction asked for", detail=detail))
    response.headers["location"] = f"/v1/scans/{record.id}"
    return Accepted(id=record.id, state=record.state)


@router.post("/checkpoint", operation_id="checkCheckpoint", status_code=202, responses=_STARTS)
async def check_checkpoint(sidecar: TheSidecar, caller: access.Mitigator, response: Response) -> Accepted:
    """Hold the checkpoint's files against the manifest of the settings, and memory against the files; then sweep.

    The scope `mitigate`, because it takes time of the engine and of the disk.
    """
    await sidecar.watcher.look()
    record = sidecar.runner.start(sidecar.sweeps.check(ScanTrigger.REQUEST, caller.name))
    response.headers["location"] = f"/v1/scans/{record.id}"
    return Accepted(id=record.id, state=record.state)
