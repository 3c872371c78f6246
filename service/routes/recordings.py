"""`/v1/recordings`: the states of the healthy model that the differential monitor holds the live one against."""

from fastapi import APIRouter, Response

from ..problem import Kind, responses
from ..schemas import Accepted, RecordingView
from .access import GUARDED, READING, Admin, Reader, TheSidecar
from .vouching import start_recording, the_current

router = APIRouter(prefix="/v1/recordings", tags=["recordings"])


@router.get("", operation_id="getRecording", responses=responses(*GUARDED, Kind.NOT_FOUND), openapi_extra=READING)
async def get_recording(sidecar: TheSidecar, _: Reader) -> RecordingView:
    """Whose states are kept, and since when; the states themselves have megabytes and are not shown."""
    recording = the_current(sidecar.recordings)
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
    return await start_recording(sidecar, sidecar.differentials, "states", caller, response)


@router.delete("", operation_id="removeRecording", status_code=204, responses=responses(*GUARDED, Kind.NOT_FOUND))
async def remove_recording(sidecar: TheSidecar, caller: Admin) -> None:
    """Forget the states."""
    the_current(sidecar.recordings)
    sidecar.recordings.remove(caller.name)
