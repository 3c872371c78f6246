"""One HTTP connection to vLLM, under the clients of the probe and of vLLM's own API.

No message of a failure holds a secret: neither the token, nor a password in the URL.
"""

import re
from types import TracebackType
from typing import Any, Self

import httpx


class Connection:
    """The server at `base_url`, asked with a bearer token or without one.  `timeout` is in seconds."""

    away: type[Exception]
    """Raised with one sentence when the server does not answer; each client has its own."""
    late: type[Exception]
    """Raised where it was asked and did not answer in time: a kind of `away`."""

    def __init__(self, base_url: str, token: str | None, timeout: float) -> None:
        self.shown_url = without_userinfo(base_url)
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            timeout=timeout,
            # Shorter than uvicorn's 5 s: a connection that the server closes at the moment of use is a false "away".
            limits=httpx.Limits(keepalive_expiry=2.0),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        """The answer, whatever its status; `more` goes to httpx.  Raises `away` or `late`."""
        try:
            return await self._http.request(method, path, **more)
        except httpx.ConnectTimeout:
            raise self.away(f"vLLM at {self.shown_url} took no connection in time.") from None
        except httpx.TimeoutException:
            raise self.late(f"vLLM at {self.shown_url} did not answer {method} {path} in time.") from None
        except httpx.HTTPError as error:
            raise self.away(f"vLLM at {self.shown_url} cannot be reached: {reason(error)}.") from None


def reason(error: Exception) -> str:
    """Why a request failed, in httpx's words, without what was sent."""
    # h11 quotes the header that it refuses, and the header is the token.
    quotes = isinstance(error, httpx.LocalProtocolError)
    return type(error).__name__ if quotes else str(error) or type(error).__name__


def without_userinfo(url: str) -> str:
    """The URL without `user:password@`, for messages."""
    return re.sub(r"^([^/?#]*://)?[^/?#]*@", r"\1", url)
