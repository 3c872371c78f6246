"""The API's description: committed, complete, and true under generated requests."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given
from hypothesis import settings as bounded
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from flipwatch.service.app import create_app, openapi_document
from flipwatch.service.openapi import text
from flipwatch.service.settings import Settings

from .conftest import TOKENS
from .fake_server import PROBE_TOKEN, FakeServer

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi.json"

schema = schemathesis.openapi.from_dict(openapi_document())


def test_the_committed_description_has_not_drifted() -> None:
    """docs/openapi.json is what the code says; after a wanted change run `python -m flipwatch.service.openapi`."""
    assert DOCUMENT.read_text(encoding="utf-8") == text()


def test_every_operation_has_a_stable_id_and_declares_its_problems() -> None:
    """Generated clients use the ids as function names; guarded routes say that they answer 401 and 403."""
    operations = {
        operation["operationId"]: (path, operation)
        for path, methods in openapi_document()["paths"].items()
        for operation in methods.values()
    }
    assert {"getStates", "startScan", "startMitigation", "undoMitigation", "injectFault"} <= set(operations)
    for path, operation in operations.values():
        if path.startswith("/v1"):
            assert {"401", "403"} <= set(operation["responses"])
            assert operation["security"]


@pytest.fixture(scope="module")
def sidecar_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A sidecar on a real port, before a fake vLLM whose block 4 does harm."""
    with FakeServer() as server:
        server.harm[4] = 5.0
        settings = Settings(
            data_dir=tmp_path_factory.mktemp("data"),
            probe_token=PROBE_TOKEN,
            tokens=TOKENS,
            vllm={"url": server.url, "poll_seconds": 1},
            scan={"every_minutes": None, "duty": 1.0},
            fingerprint={"every_minutes": None},
            mitigation={"mode": "enforce", "max_actions": 1000},
            faults={"enabled": True},
        )
        listener = FakeServer._listener(0)
        app = create_app(settings)
        running = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        running.should_exit = True
        thread.join(20)


def _undrain(url: str) -> None:
    """A generated request may have drained the server, and then /readyz answers 503, as it should."""
    with httpx.Client(base_url=url, headers={"authorization": "Bearer token-of-the-boss"}) as client:
        for record in client.get("/v1/mitigations", params={"limit": 1000}).json():
            if (record["action"], record["state"]) == ("drain", "active"):
                assert client.delete(f"/v1/mitigations/{record['id']}").status_code == 202


OPERATIONS = {
    f"{method.upper()} {path}": (path, method.upper())
    for path, methods in openapi_document()["paths"].items()
    for method in methods
}


# Not by `schema.parametrize`: all its tests have one name, and pytest-xdist runs one test of a name.
@pytest.mark.parametrize("operation", OPERATIONS)
def test_generated_requests_are_answered_as_described(operation: str, sidecar_url: str) -> None:
    """No 500, no undeclared status, no body that is not what the description says; wrong requests are refused."""
    path, method = OPERATIONS[operation]
    if path == "/readyz":
        _undrain(sidecar_url)

    @given(case=schema[path][method].as_strategy())
    @bounded(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    def answered(case: schemathesis.Case) -> None:
        # Schemathesis tries without a token by leaving out what it made itself, and sends ours all the same.
        # JSON Schema takes 4.0 for an integer and knows nothing of "skip without alpha": the API refuses both.
        case.call_and_validate(
            base_url=sidecar_url,
            headers={"authorization": "Bearer token-of-the-boss"},
            excluded_checks=[ignored_auth, positive_data_acceptance],
        )

    answered()
