"""`/v1/scans`: scans so far, and a new one now."""

from fastapi import APIRouter, Response

from ...monitors.canary.finding import NAME as CANARY
from ...monitors.differential.facts import NAME as DIFFERENTIAL
from ...monitors.differential.reference import ReferenceKind
from ...monitors.fingerprint.judgement import NAME as FINGERPRINT
from ..body import BoundedRoute
from ..problem import Kind, ProblemError, responses
from ..records import ScanRecord, ScanTrigger
from ..schemas import Accepted, ScanOrder, ScanView
from .access import GUARDED, READING, Limit, Mitigator, Reader, TheSidecar

router = APIRouter(prefix="/v1/scans", tags=["scans"], route_class=BoundedRoute)


@router.get("", operation_id="listScans", responses=responses(*GUARDED, Kind.INVALID), openapi_extra=READING)
async def list_scans(sidecar: TheSidecar, _: Reader, limit: Limit = 100) -> list[ScanRecord]:
    """The last scans, newest first."""
    return [sidecar.runner.record(scan.id) or scan for scan in sidecar.store.scans(limit)]


@router.post(
    "",
    operation_id="startScan",
    status_code=202,
    responses=responses(*GUARDED, Kind.CONFLICT, Kind.INVALID, Kind.VLLM_AWAY),
)
async def start_scan(sidecar: TheSidecar, _: Mitigator, response: Response, order: ScanOrder | None = None) -> Accepted:
    """Scan, sweep, compare or ask now, in the background; the scope `mitigate`, because it takes time of the engine."""
    order = order or ScanOrder()
    # The canary needs no probe: that one may be away because the engine hangs.
    if not sidecar.live.up and order.monitor != CANARY:
        raise ProblemError(Kind.VLLM_AWAY, sidecar.live.away)
    if order.monitor == CANARY:
        job = sidecar.canaries.job(ScanTrigger.REQUEST)
    elif order.monitor == FINGERPRINT:
        job = sidecar.sweeps.sweep(ScanTrigger.REQUEST)
    elif order.monitor == DIFFERENTIAL:
        if order.reference is ReferenceKind.PEER and sidecar.peer is None:
            raise ProblemError(Kind.CONFLICT, "There is no peer: set differential.peer_url and a token for it.")
        job = sidecar.differentials.job(ScanTrigger.REQUEST, order.reference)
    else:
        job = sidecar.scans.job(ScanTrigger.REQUEST, order.grid)
    record = sidecar.runner.start(job)
    response.headers["location"] = f"/v1/scans/{record.id}"
    return Accepted(id=record.id, state=record.state)


@router.get("/{scan_id}", operation_id="getScan", responses=responses(*GUARDED, Kind.NOT_FOUND), openapi_extra=READING)
async def get_scan(sidecar: TheSidecar, _: Reader, scan_id: str) -> ScanView:
    """One scan with its progress, and with its finding once there is one."""
    record = sidecar.runner.record(scan_id)
    if record is None:
        raise ProblemError(Kind.NOT_FOUND, f"There is no scan {scan_id}.")
    finding = None if record.finding_id is None else sidecar.store.finding(record.finding_id)
    return ScanView(**record.model_dump(), finding=None if finding is None else finding.body)
