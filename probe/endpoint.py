"""vLLM's endpoint plugin: the probe's routes on the server's own port, with the probe's own token.

The routes lie outside `/v1`, which vLLM guards with its own API key: the two keys do not mix.  See
`monitors.wire` for the routes and bodies.
"""

import hmac
import logging
import uuid
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from ..monitors.fingerprint.facts import (
    CheckpointFacts,
    FileDigest,
    FileOrder,
    IntegrityFacts,
    RepairOrder,
    RepairReport,
)
from ..monitors.wire import (
    PREFIX,
    Advance,
    Fault,
    FaultOrder,
    GateChange,
    GateReport,
    MeasureOrder,
    ModelFacts,
    Problem,
    Progress,
    SelfTest,
)
from . import switches
from .engine import Engine, ProbeError, problem_of
from .live import LiveServer
from .live_integrity import LiveIntegrity
from .load import Load

logger = logging.getLogger("vllm.flipwatch")

_STARTING = "vLLM is still starting; try again in a moment."


def problem_response(problem: Problem) -> JSONResponse:
    """RFC 9457."""
    return JSONResponse(problem.model_dump(), problem.status, media_type="application/problem+json")


class ProblemRoute(APIRoute):
    """Answers errors with problem+json, whatever handlers vLLM's app installs."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                _authorise(request)
                return await handler(request)
            except ProbeError as error:
                return problem_response(error.problem)
            except RequestValidationError as error:
                first = error.errors()[0]
                place = ".".join(str(part) for part in first["loc"])
                detail = f"{place}: {first['msg']}"
                return problem_response(Problem(title="Wrong request", status=422, detail=detail))
            except HTTPException as error:
                return problem_response(Problem(title="Wrong request", status=error.status_code, detail=error.detail))
            except Exception as error:
                logger.exception("Flipwatch failed to answer %s.", request.url.path)
                return problem_response(problem_of(error))

        return guarded


def _authorise(request: Request) -> None:
    expected = switches.token()
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    matches = hmac.compare_digest(given.strip().encode(), (expected or "").encode())
    if expected is None or scheme.lower() != "bearer" or not matches:
        raise ProbeError(401, "Unauthorised", "Send the probe's token as 'Authorization: Bearer ...'.")


def _live(request: Request) -> LiveServer:
    live = getattr(request.app.state, "flipwatch", None)
    if live is None:
        raise ProbeError(503, "Not ready", _STARTING)
    return live  # type: ignore[no-any-return]


def _integrity(request: Request) -> LiveIntegrity:
    integrity = getattr(request.app.state, "flipwatch_integrity", None)
    if integrity is None:
        raise ProbeError(503, "Not ready", _STARTING)
    return integrity  # type: ignore[no-any-return]


Live = Annotated[LiveServer, Depends(_live)]
Integrity = Annotated[LiveIntegrity, Depends(_integrity)]
router = APIRouter(prefix=PREFIX, route_class=ProblemRoute, include_in_schema=False)


@router.get("/model")
async def model(live: Live) -> ModelFacts:
    """What is served now."""
    return await live.facts()


@router.post("/self-test")
async def self_test(live: Live) -> SelfTest:
    """Do the gates act?"""
    return await live.self_test()


@router.put("/gates")
async def gates(live: Live, change: GateChange) -> GateReport:
    """Change the served model: all gates or none."""
    return await live.set_gates(change)


@router.post("/measurements", status_code=201)
async def open_measurement(live: Live, order: MeasureOrder) -> Progress:
    """Begin a measurement; one that was under way is dropped."""
    return await live.open(uuid.uuid4().hex, order)


@router.post("/measurements/{id}/advance")
async def advance(live: Live, id: str, advance: Advance) -> Progress:
    """Do some units of work between two engine steps."""
    return await live.advance(id, advance.steps, advance.patience_seconds)


@router.delete("/measurements/{id}", status_code=204)
async def close(live: Live, id: str) -> None:
    """Drop a measurement."""
    await live.close(id)


@router.post("/faults", status_code=201)
async def add_fault(live: Live, order: FaultOrder) -> Fault:
    """Damage a tensor in memory."""
    return await live.add_fault(uuid.uuid4().hex, order)


@router.delete("/faults/{id}", status_code=204)
async def remove_fault(live: Live, id: str) -> None:
    """Put the values back."""
    await live.remove_fault(id)


@router.get("/integrity")
async def integrity(integrity: Integrity) -> IntegrityFacts:
    """The baselines of the weights' bytes."""
    return await integrity.facts()


@router.post("/repairs")
async def repair(integrity: Integrity, order: RepairOrder) -> RepairReport:
    """Put chunks of weights right, each byte held against its digest."""
    return await integrity.repair(order)


@router.get("/checkpoint")
async def checkpoint(integrity: Integrity) -> CheckpointFacts:
    """The files that the model came from."""
    return await integrity.checkpoint()


@router.post("/checkpoint/digests")
async def digest(integrity: Integrity, order: FileOrder) -> FileDigest:
    """SHA-256 of one of them, as the disk holds it."""
    return await integrity.digest(order)


class QuietScans(logging.Filter):
    """Keeps the hundreds of parts of a scan, and the sidecar's glances, out of vLLM's access log; errors stay."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for an answered part or glance; other records pass."""
        match record.args:
            case (_, _, str(path), _, int(status)):
                return status >= 400 or not path.startswith(
                    (f"{PREFIX}/measurements", f"{PREFIX}/model", f"{PREFIX}/integrity")
                )
            case _:
                return True


class ProbeEndpoint:
    """Entry point `vllm.endpoint_plugins`."""

    name = "flipwatch"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, unless the probe is switched off."""
        if switches.enabled():
            app.include_router(router)
            logging.getLogger("uvicorn.access").addFilter(QuietScans())

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep vLLM's engine client for the routes."""
        if engine_client is not None and switches.enabled():
            engine = Engine(engine_client)
            state.flipwatch = LiveServer(engine, Load(engine_client), version("flipwatch"))
            state.flipwatch_integrity = LiveIntegrity(engine, engine_client.vllm_config)
