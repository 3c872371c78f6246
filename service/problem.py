"""Errors of the API: RFC 9457 problem documents, for everything that is not a success.

The `type` is stable and made for programs: `urn:flipwatch:problem:NAME`.  The names are in `Kind`.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from ..monitors.wire import Problem
from .baseline import BaselineError
from .guard import (
    InvalidOrder,
    MitigationConflict,
    MitigationError,
    UnknownBlock,
    UnknownMitigation,
)
from .probe import ProbeError, ProbeRefused
from .runner import ScanBusy
from .store import StoreError

MEDIA_TYPE = "application/problem+json"

_log = structlog.get_logger(__name__)


class Kind(Enum):
    """Name in the type URI, HTTP status, title."""

    UNAUTHENTICATED = ("unauthenticated", 401, "A valid bearer token is needed")
    FORBIDDEN = ("forbidden", 403, "Not allowed")
    NOT_FOUND = ("not-found", 404, "No such resource")
    UNKNOWN_BLOCK = ("unknown-block", 404, "The model has no such block")
    METHOD_NOT_ALLOWED = ("method-not-allowed", 405, "This resource has no such method")
    CONFLICT = ("conflict", 409, "Not possible now")
    TOO_LARGE = ("too-large", 413, "The body is too large")
    INVALID = ("invalid-request", 422, "The request is not valid")
    INTERNAL = ("internal", 500, "Flipwatch failed")
    REFUSED_BY_VLLM = ("refused-by-vllm", 502, "The probe inside vLLM refused")
    VLLM_AWAY = ("vllm-away", 503, "vLLM or its probe does not answer")
    NOT_READY = ("not-ready", 503, "Flipwatch is not ready")
    BUSY = ("busy", 503, "Something else has to end first")
    STORE = ("store", 503, "The store cannot be used")

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.value[1]


class ProblemError(Exception):
    """Raised by a route to answer with a problem; `detail` is one sentence."""

    def __init__(self, kind: Kind, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.headers = headers


def document(kind: Kind, detail: str, headers: dict[str, str] | None = None, **more: object) -> JSONResponse:
    """The response of a problem."""
    name, status, title = kind.value
    body = {"type": f"urn:flipwatch:problem:{name}", "title": title, "status": status, "detail": detail, **more}
    return JSONResponse(body, status, headers=headers, media_type=MEDIA_TYPE)


def responses(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route that may answer with these problems."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    by_status: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        titles = [by_status[kind.status]["description"]] if kind.status in by_status else []
        by_status[kind.status] = {"description": "; ".join([*titles, kind.value[2]]), "content": content}
    return by_status


def of_mitigation(error: MitigationError) -> ProblemError:
    """A refused mitigation as a problem."""
    if isinstance(error, UnknownMitigation):
        kind = Kind.NOT_FOUND
    elif isinstance(error, UnknownBlock):
        kind = Kind.UNKNOWN_BLOCK
    elif isinstance(error, InvalidOrder):
        kind = Kind.INVALID
    elif isinstance(error, MitigationConflict):
        kind = Kind.CONFLICT
    else:
        # What the settings or this vLLM do not allow; trying again changes nothing.
        kind = Kind.FORBIDDEN
    return ProblemError(kind, str(error))


def of_probe(error: ProbeError) -> ProblemError:
    """A failed request to the probe as a problem."""
    if not isinstance(error, ProbeRefused):
        return ProblemError(Kind.VLLM_AWAY, str(error))
    kinds = {403: Kind.FORBIDDEN, 404: Kind.NOT_FOUND, 409: Kind.CONFLICT, 422: Kind.INVALID}
    return ProblemError(kinds.get(error.status, Kind.REFUSED_BY_VLLM), error.detail)


def install(app: FastAPI) -> None:
    """Make every error of the app a problem document."""

    @app.exception_handler(ProblemError)
    async def _problem(_: Request, error: ProblemError) -> JSONResponse:
        return document(error.kind, error.detail, error.headers)

    @app.exception_handler(MitigationError)
    async def _mitigation(request: Request, error: MitigationError) -> JSONResponse:
        return await _problem(request, of_mitigation(error))

    @app.exception_handler(ProbeError)
    async def _probe(request: Request, error: ProbeError) -> JSONResponse:
        return await _problem(request, of_probe(error))

    @app.exception_handler(ScanBusy)
    async def _busy(_: Request, error: ScanBusy) -> JSONResponse:
        return document(Kind.CONFLICT, str(error))

    @app.exception_handler(BaselineError)
    async def _baseline(_: Request, error: BaselineError) -> JSONResponse:
        return document(Kind.CONFLICT, str(error))

    @app.exception_handler(StoreError)
    async def _store(_: Request, error: StoreError) -> JSONResponse:
        _log.error("store", reason=str(error))
        return document(Kind.STORE, f"{str(error).rstrip('.')}.")

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Without the input: it may be large, not finite, or a secret in the wrong place.
        faults = [_fault(e) for e in error.errors()]
        first = faults[0]
        return document(Kind.INVALID, f"{first['at']}: {first['what']}.", errors=faults)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        headers = dict(error.headers) if error.headers else None
        if error.status_code == 405:
            # Starlette names only the methods of the first route of the path.
            allow = {"Allow": ", ".join(_methods(request))}
            return document(Kind.METHOD_NOT_ALLOWED, f"{request.url.path} does not answer {request.method}.", allow)
        if error.status_code == 404:
            return document(Kind.NOT_FOUND, f"There is nothing at {request.url.path}.", headers)
        kind = next((kind for kind in Kind if kind.status == error.status_code), Kind.INVALID)
        return document(kind, str(error.detail), headers)

    @app.exception_handler(Exception)
    async def _internal(request: Request, error: Exception) -> JSONResponse:
        _log.error("request failed", path=request.url.path, exc_info=error)
        return document(Kind.INTERNAL, f"{type(error).__name__}; the log of flipwatch serve has the details.")


def _fault(error: Mapping[str, Any]) -> dict[str, str]:
    if error["type"] == "json_invalid":
        # FastAPI's words do not say what is wrong with it, and where.
        return {"at": "body", "what": f"cannot be read as JSON: {error['ctx']['error']}"}
    return {"at": ".".join(str(part) for part in error["loc"]), "what": str(error["msg"])}


def _methods(request: Request) -> list[str]:
    """What the path of the request does answer."""
    matching = (
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    )
    return sorted({method for route in matching for method in route.methods or ()})


__all__ = ["MEDIA_TYPE", "Kind", "Problem", "ProblemError", "document", "install", "responses"]
