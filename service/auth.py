"""Who may do what: bearer tokens with the scopes read < mitigate < admin.

Reading is open without a token to callers on the loopback interface, so that `curl` and the status page work on
the machine itself; everybody else needs a token.  Changing anything always needs one: while no token with the
scope is configured, nobody can.  `/metrics`, `/livez` and `/readyz` are open.
"""

import hmac
import ipaddress
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

from fastapi import Request, Security
from fastapi.security import HTTPBearer

from .problem import Kind, ProblemError
from .settings import Scope, Token

ANONYMOUS = "anonymous"
"""The actor of a request without a token."""

BEARER = HTTPBearer(auto_error=False, scheme_name="bearer", description="A token of the setting `tokens`.")

_RANK: dict[Scope, int] = {"read": 0, "mitigate": 1, "admin": 2}


class Caller(NamedTuple):
    """Who sent a request, and what that one may do."""

    name: str
    scopes: list[Scope]


class Guard:
    """Checks requests against the configured tokens."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = [(token.token.get_secret_value().encode(), token) for token in tokens]

    def caller(self, request: Request, needed: Scope) -> Caller:
        """Whoever the token is of that allows the request; `ProblemError` when nothing does."""
        presented = _presented(request)
        if presented is None:
            if needed == "read" and _on_loopback(request):
                return Caller(ANONYMOUS, ["read"])
            if not any(_allows(token, needed) for _, token in self._tokens):
                raise ProblemError(
                    Kind.FORBIDDEN,
                    f"No token with the scope {needed} is configured, so nobody may do this: add one to the setting "
                    "tokens or tokens_file.",
                )
            raise _unauthenticated("Send a token as `Authorization: Bearer TOKEN`.")
        # All tokens are compared, each in constant time: the time tells neither which matched nor how far.
        matched = None
        for secret, token in self._tokens:
            if hmac.compare_digest(secret, presented):
                matched = token
        if matched is None:
            raise _unauthenticated("The token is not known here.")
        if not _allows(matched, needed):
            raise ProblemError(
                Kind.FORBIDDEN, f"The token {matched.name} does not have the scope {needed} that this needs."
            )
        return Caller(matched.name, matched.scopes)


def require(scope: Scope) -> Callable[..., Caller]:
    """A dependency that yields the caller of a request that has the scope."""

    # The scheme is only named here, so that the API's description has it; `Guard` reads the header itself.
    def caller(request: Request, _: Annotated[object, Security(BEARER)]) -> Caller:
        guard: Guard = request.app.state.guard
        return guard.caller(request, scope)

    return caller


def _allows(token: Token, needed: Scope) -> bool:
    return any(_RANK[scope] >= _RANK[needed] for scope in token.scopes)


def _presented(request: Request) -> bytes | None:
    header = request.headers.get("authorization")
    if header is None:
        return None
    kind, _, token = header.partition(" ")
    if kind.lower() != "bearer" or not token.strip():
        raise _unauthenticated("The Authorization header must be `Bearer TOKEN`.")
    # Starlette reads headers as latin-1: the same way back gives the bytes that were sent.
    return token.strip().encode("latin-1")


def _on_loopback(request: Request) -> bool:
    if request.client is None:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def _unauthenticated(detail: str) -> ProblemError:
    return ProblemError(Kind.UNAUTHENTICATED, detail, {"WWW-Authenticate": 'Bearer realm="flipwatch"'})
