"""What routes depend on: the sidecar, and a caller with a scope."""

from typing import Annotated, Any, cast

from fastapi import Depends, Query, Request

from ..auth import Caller, require
from ..problem import Kind
from ..sidecar import Sidecar


def _sidecar(request: Request) -> Sidecar:
    return cast(Sidecar, request.app.state.sidecar)


TheSidecar = Annotated[Sidecar, Depends(_sidecar)]
Reader = Annotated[Caller, Depends(require("read"))]
Mitigator = Annotated[Caller, Depends(require("mitigate"))]
Admin = Annotated[Caller, Depends(require("admin"))]
Limit = Annotated[int, Query(ge=1, le=1000)]

# What every guarded route may answer with.
GUARDED = (Kind.UNAUTHENTICATED, Kind.FORBIDDEN, Kind.STORE)

# Reading needs no token on loopback: in the description the bearer token is one way and none is the other.
READING: dict[str, Any] = {"security": [{}]}
