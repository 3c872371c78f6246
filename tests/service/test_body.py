"""The body of a request: bounded for everybody, and never more than one sentence of trouble for who sends a bad one."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from flipwatch.service.app import openapi_document
from flipwatch.service.body import MOST_BYTES

Start = Callable[..., Any]

TAKING_A_BODY = [
    (method.upper(), path.replace("{action}", "repair"))
    for path, operations in openapi_document()["paths"].items()
    for method, operation in operations.items()
    if "requestBody" in operation
]
JSON = {"content-type": "application/json"}


def test_there_are_routes_that_take_a_body() -> None:
    """The tests below would pass without any."""
    assert ("POST", "/v1/alertmanager/repair") in TAKING_A_BODY
    assert ("POST", "/v1/mitigations") in TAKING_A_BODY
    assert not [path for _, path in TAKING_A_BODY if "{" in path]


async def test_a_body_that_is_too_large_is_refused_unread(start: Start) -> None:
    """Also without a token, whether the body says how large it is or not; not much more than the bound is taken."""
    api = await start()
    for method, path in TAKING_A_BODY:
        taken = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal taken
            while taken < 20 * MOST_BYTES:
                taken += 2**16
                yield b" " * 2**16

        for content in (b" " * (MOST_BYTES + 1), endless()):
            response = await api.client.request(method, path, content=content, headers=JSON)
            assert response.status_code == 413, (path, response.text)
            assert response.json()["type"] == "urn:flipwatch:problem:too-large"
            assert str(MOST_BYTES) in response.json()["detail"]
        assert MOST_BYTES < taken <= MOST_BYTES + 2**17


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (rb'{"reason": "\ud800"}', "hex escape"),
        (rb'{"alerts": [{"labels": {"alertname": "Flipwatch\ud800"}}]}', "hex escape"),
        (b'{"alpha": NaN}', "expected value"),
        (b'{"reason": "\xff"}', "invalid unicode"),
        (b"[" * 100_000, "recursion limit"),
        (b'{"reason": ', "EOF while parsing"),
    ],
)
async def test_what_is_no_json_is_named(start: Start, body: bytes, why: str) -> None:
    """One sentence says what is wrong with it and where; nothing is done."""
    api = await start(faults={"enabled": True})
    headers = JSON | {"authorization": "Bearer token-of-the-boss"}
    for method, path in TAKING_A_BODY:
        response = await api.client.request(method, path, content=body, headers=headers)
        assert response.status_code == 422, (path, response.text)
        assert response.json()["type"] == "urn:flipwatch:problem:invalid-request"
        detail = response.json()["detail"]
        assert detail.startswith("body: cannot be read as JSON: ")
        assert why in detail
        assert " at line 1 column " in detail
    assert (await api.get("/v1/mitigations")).json() == []
    assert (await api.get("/v1/scans")).json() == []
