"""`/v1/recordings`: the states of the healthy model that the differential monitor holds the live one against."""

from fastapi import APIRouter, Response

from ...monitors.differential.reference import Recording
from ..problem import Kind, ProblemError, responses
from ..records import Event
from ..schemas import Accepted, RecordingView
from ..sidecar import Sidecar
from .access import GUARDED, READING, Admin, Reader, TheSidecar

router = APIRouter(prefix="/v1/recordings", tags=["recordings"])


@router.get("", operation_id="getRecording", responses=responses(*GUARDED, Kind.NOT_FOUND), openapi_extra=READING)
async def get_recording(sidecar: TheSidecar, _: Reader) -> RecordingView:
    """Whose states are kept, and since when; the states themselves have megabytes and are not shown."""
    recording = _current(sidecar)
    tokens = recording.plan.tokens
    return RecordingView(
        recorded_at=recording.recorded_at,
        conditions=recording.conditions,
        sequences=len(tokens),
        tokens=sum(map(len, tokens)),
        prefix=min(recording.plan.prefix, len(tokens[0])),
    )


@router.post(
    "",
    operation_id="recordStates",
    status_code=202,
    responses=responses(*GUARDED, Kind.CONFLICT, Kind.REFUSED_BY_VLLM, Kind.VLLM_AWAY),
)
async def record_states(sidecar: TheSidecar, caller: Admin, response: Response) -> Accepted:
    """Record the states of the model as it is now, known to be good, and hold it against them at once.

    `Location` is the scan; once it has ended, its `recording_refusal` says why nothing new is kept, or is null.
    """
    sidecar.differentials.check_recordable(await sidecar.watcher.look())
    record = sidecar.runner.start(sidecar.differentials.record(caller.name))
    detail = {"scan_id": record.id}
    sidecar.store.add_event(Event(at=sidecar.now(), actor=caller.name, what="states asked for", detail=detail))
    response.headers["location"] = f"/v1/scans/{record.id}"
    return Accepted(id=record.id, state=record.state)


@router.delete("", operation_id="removeRecording", status_code=204, responses=responses(*GUARDED, Kind.NOT_FOUND))
async def remove_recording(sidecar: TheSidecar, caller: Admin) -> None:
    """Forget the states."""
    _current(sidecar)
    sidecar.recordings.remove(caller.name)


def _current(sidecar: Sidecar) -> Recording:
    recording = sidecar.recordings.current
    if recording is None:
        raise ProblemError(
            Kind.NOT_FOUND, "There are no recorded states: record them while the model is known to be good."
        )
    return recording
