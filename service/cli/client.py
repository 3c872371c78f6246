"""The sidecar as the command line sees it: JSON over HTTP, every failure one sentence."""

import os
import time
from collections.abc import Callable
from typing import Any

import httpx
from pydantic import ValidationError

from ...monitors.wire import Problem
from ..connection import reason, without_userinfo

URL_VARIABLE = "FLIPWATCH_URL"
TOKEN_VARIABLE = "FLIPWATCH_TOKEN"  # noqa: S105 - a name, no secret
DEFAULT_URL = "http://127.0.0.1:9477"

Json = dict[str, Any]

_POLL_SECONDS = 0.3


class CliError(Exception):
    """Something that the operator can put right; the message is one sentence.  Exit code 2."""


class Refused(CliError):
    """The sidecar answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Sidecar:
    """A running `flipwatch serve`, found by FLIPWATCH_URL and FLIPWATCH_TOKEN."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        full_url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        self.url = without_userinfo(full_url)
        self.token = (token or os.environ.get(TOKEN_VARIABLE) or "").strip() or None
        headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        # No proxies from the environment: the sidecar is a neighbour, and the token is meant for it alone.
        try:
            self._http = httpx.Client(base_url=full_url, headers=headers, timeout=30.0, trust_env=False)
        except (httpx.InvalidURL, ValueError, UnicodeError):
            raise CliError(f"{URL_VARIABLE} or {TOKEN_VARIABLE} cannot be used in a request: correct it.") from None

    def __enter__(self) -> "Sidecar":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        """Body of a GET."""
        return self._body(self._send("GET", path))

    def post(self, path: str, body: Json, seconds: float | None = None) -> Json:
        """Body of a POST's answer; `seconds` for one that may take longer than others."""
        answer: Json = self._body(self._send("POST", path, body, seconds))
        return answer

    def put(self, path: str, body: Json) -> Json:
        """Body of a PUT's answer."""
        answer: Json = self._body(self._send("PUT", path, body))
        return answer

    def delete(self, path: str) -> Json | None:
        """Body of a DELETE's answer, None when it has none."""
        response = self._send("DELETE", path)
        return self._body(response) if response.content else None

    def wait(self, path: str, settled: Callable[[Json], bool], each: Callable[[Json], None] = lambda _: None) -> Json:
        """Read `path` until `settled` says so; `each` sees every reading on the way."""
        while True:
            record: Json = self.get(path)
            each(record)
            if settled(record):
                return record
            time.sleep(_POLL_SECONDS)

    def _send(self, method: str, path: str, body: Json | None = None, seconds: float | None = None) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else seconds
        try:
            response = self._http.request(method, path, json=body, timeout=timeout)
        except ValueError:
            # A surrogate from an argument that is not UTF-8.
            raise CliError("The arguments hold something that cannot be sent: correct them.") from None
        except httpx.TimeoutException:
            raise CliError(f"The sidecar at {self.url} did not answer {method} {path} in time.") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CliError(
                f"The sidecar at {self.url} cannot be reached ({reason(error)}): "
                f"start `flipwatch serve`, or set {URL_VARIABLE}."
            ) from None
        if response.is_success:
            return response
        raise Refused(response.status_code, self._why(response, method, path))

    def _why(self, response: httpx.Response, method: str, path: str) -> str:
        if response.status_code == 401:
            if self.token is None:
                return f"The sidecar at {self.url} wants a token: set {TOKEN_VARIABLE}."
            return f"The sidecar at {self.url} refused the token in {TOKEN_VARIABLE}."
        try:
            return " ".join(Problem.model_validate_json(response.content).detail.split())
        except ValidationError:
            return f"{self.url} answered {method} {path} with HTTP {response.status_code}: is this Flipwatch's sidecar?"

    def _body(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise CliError(f"{self.url} answered without JSON: is this Flipwatch's sidecar?") from None
