"""The HTTP application of the sidecar."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .. import __version__
from .auth import Guard
from .metrics import registry
from .problem import Kind, Problem, install, responses
from .routes import ROUTERS
from .settings import Settings
from .sidecar import Sidecar

_DESCRIPTION = (
    "Watches one vLLM server for silently corrupted blocks. Errors are RFC 9457 problem documents whose `type` is "
    "`urn:flipwatch:problem:NAME`."
)


def create_app(settings: Settings) -> FastAPI:
    """The app with everything behind it; raises what `Sidecar` raises."""
    sidecar = Sidecar(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with sidecar:
            yield

    app = _bare(lifespan=lifespan)
    app.state.sidecar = sidecar
    app.state.guard = Guard(sidecar.tokens)
    app.state.registry = registry(sidecar)
    return app


def openapi_document() -> dict[str, Any]:
    """The API's description; needs no settings."""
    return _bare().openapi()


def _bare(**options: Any) -> FastAPI:
    app = FastAPI(
        title="Flipwatch", version=__version__, description=_DESCRIPTION, docs_url=None, redoc_url=None, **options
    )
    install(app)
    for router in ROUTERS:
        app.include_router(router)

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            # Problems are answered by handlers, which FastAPI does not know of.
            schema["components"]["schemas"]["Problem"] = Problem.model_json_schema()
            [too_large] = responses(Kind.TOO_LARGE).values()
            for operation in (operation for path in schema["paths"].values() for operation in path.values()):
                if "requestBody" in operation:
                    operation["responses"][str(Kind.TOO_LARGE.status)] = too_large
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]
    return app
