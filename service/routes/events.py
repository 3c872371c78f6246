"""`/v1/events`: the audit log."""

from fastapi import APIRouter

from ..problem import Kind, responses
from ..records import Event
from .access import GUARDED, READING, Limit, Reader, TheSidecar

router = APIRouter(prefix="/v1", tags=["events"])


@router.get("/events", operation_id="listEvents", responses=responses(*GUARDED, Kind.INVALID), openapi_extra=READING)
async def list_events(sidecar: TheSidecar, _: Reader, limit: Limit = 100) -> list[Event]:
    """The last lines of the audit log, newest first: who changed what, and what Flipwatch did by itself."""
    return sidecar.store.events(limit)
