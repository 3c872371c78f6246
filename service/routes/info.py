"""`/v1/info`: what runs here."""

import platform

from fastapi import APIRouter

from ... import __version__
from ..problem import responses
from ..schemas import CallerView, InfoView
from .access import GUARDED, READING, Reader, TheSidecar

router = APIRouter(prefix="/v1", tags=["info"])


@router.get("/info", operation_id="getInfo", responses=responses(*GUARDED), openapi_extra=READING)
async def get_info(sidecar: TheSidecar, caller: Reader) -> InfoView:
    """Versions, settings without secrets, the caller, and the model as the probe saw it last."""
    return InfoView(
        flipwatch_version=__version__,
        python_version=platform.python_version(),
        caller=CallerView(name=caller.name, scopes=caller.scopes),
        settings=sidecar.settings.public(),
        probe=sidecar.live.facts,
    )
