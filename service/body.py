"""The body of a request: no larger than it needs to be, and JSON that is text.

FastAPI reads a body before it looks at the token: the bound holds for everybody.
"""

from collections.abc import Callable, Coroutine
from json import JSONDecodeError
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException

MOST_BYTES = 4 * 2**20
"""A clean profile is the largest body, some hundred bytes for each block and 20 for each sequence."""


class BoundedRoute(APIRoute):
    """A route that takes a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI makes it, with a body that is bounded."""
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handler(_Bounded(request.scope, request.receive))

        return bounded


class _Bounded(Request):
    async def body(self) -> bytes:
        """All of it; raises `HTTPException` 413 as soon as it is too large, however large it says that it is."""
        if not hasattr(self, "_body"):
            body = bytearray()
            async for part in self.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise HTTPException(413, f"The body is larger than the {MOST_BYTES} bytes that are read.")
            self._body = bytes(body)
        return self._body

    async def json(self) -> Any:
        r"""Its value; raises `JSONDecodeError` also for NaN, and for "\ud800", half a character that no file takes."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise JSONDecodeError(str(error), "", 0) from None
