"""`/v1/baselines`: the clean profile that scans are judged with."""

from fastapi import APIRouter, Response

from ...monitors.alpha_scan import Profile
from ..baseline import check_recordable
from ..body import BoundedRoute
from ..measuring import ScanError
from ..problem import Kind, ProblemError, responses
from ..records import Event, ScanTrigger
from ..schemas import Accepted
from ..sidecar import Sidecar
from ..validation_set import ValidationSetError
from ..vllm import VllmError
from .access import GUARDED, READING, Admin, Reader, TheSidecar

router = APIRouter(prefix="/v1/baselines", tags=["baselines"], route_class=BoundedRoute)

_CHANGES = responses(*GUARDED, Kind.CONFLICT, Kind.INVALID, Kind.REFUSED_BY_VLLM, Kind.VLLM_AWAY)


@router.get("", operation_id="getBaseline", responses=responses(*GUARDED, Kind.NOT_FOUND), openapi_extra=READING)
async def get_baseline(sidecar: TheSidecar, _: Reader) -> Profile:
    """The clean profile; this very document can be put back, here or at another server of the same model."""
    return _current(sidecar)


@router.post("", operation_id="recordBaseline", status_code=202, responses=_CHANGES)
async def record_baseline(sidecar: TheSidecar, caller: Admin, response: Response) -> Accepted:
    """Scan now, and make the clean profile of what is measured; only where the whole model runs and nothing is found.

    `Location` is the scan; once it has ended, its `profile_refusal` says why there is no new profile, or is null.
    """
    check_recordable(await sidecar.watcher.look())
    record = sidecar.runner.start(sidecar.scans.job(ScanTrigger.BASELINE))
    detail = {"scan_id": record.id}
    sidecar.store.add_event(Event(at=sidecar.now(), actor=caller.name, what="profile asked for", detail=detail))
    response.headers["location"] = f"/v1/scans/{record.id}"
    return Accepted(id=record.id, state=record.state)


@router.put("", operation_id="importBaseline", responses=_CHANGES)
async def import_baseline(sidecar: TheSidecar, caller: Admin, profile: Profile) -> Profile:
    """Use a profile that was recorded before; one that belongs to anything but the live model is refused."""
    try:
        facts, order = await sidecar.scans.order()
    except VllmError as error:
        raise ProblemError(Kind.VLLM_AWAY, str(error)) from error
    except (ScanError, ValidationSetError) as error:
        raise ProblemError(Kind.CONFLICT, str(error)) from error
    sidecar.baseline.accept(profile, facts, order, caller.name)
    return _current(sidecar)


@router.delete("", operation_id="removeBaseline", status_code=204, responses=responses(*GUARDED, Kind.NOT_FOUND))
async def remove_baseline(sidecar: TheSidecar, caller: Admin) -> None:
    """Judge without a profile from now on."""
    _current(sidecar)
    sidecar.baseline.remove(caller.name)


def _current(sidecar: Sidecar) -> Profile:
    if sidecar.baseline.current is None:
        raise ProblemError(Kind.NOT_FOUND, "There is no clean profile: record one while the model is known to be good.")
    return sidecar.baseline.current
