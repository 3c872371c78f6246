"""`serve --stay`: a sidecar that cannot start stays alive beside the model, says why, and starts when it can."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ..vllm_server import free_port
from .fake_server import PROBE_TOKEN, FakeServer

RUN = (
    "import sys; from flipwatch.service.settings import load_settings; "
    "from flipwatch.service.staying import serve_staying; sys.exit(serve_staying(load_settings, retry_seconds=0.3))"
)


@contextmanager
def _staying(*command: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    port = free_port()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FLIPWATCH_")}
    process = subprocess.Popen(
        [sys.executable, *command],
        env=plain | {"FLIPWATCH_LISTEN_PORT": str(port), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate(timeout=10)


def _status(client: httpx.Client, path: str, wanted: int) -> httpx.Response:
    """Ask until the status is this one; it is another process, so there is nothing to await but the answer."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            answer = client.get(path)
            if answer.status_code == wanted:
                return answer
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    pytest.fail(f"{path} never answered {wanted}")


def test_it_says_why_and_starts_when_it_can(server: FakeServer, tmp_path: Path) -> None:
    """Without the file of its token it is alive and says why, once in its log; with it, it serves."""
    token = tmp_path / "probe-token"
    variables = {
        "FLIPWATCH_VLLM__URL": server.url,
        "FLIPWATCH_PROBE_TOKEN_FILE": str(token),
        "FLIPWATCH_DATA_DIR": str(tmp_path / "data"),
    }
    with _staying("-c", RUN, **variables) as (process, client):
        _status(client, "/livez", 200)
        for path in ("/readyz", "/metrics", "/v1/states"):
            problem = _status(client, path, 503).json()
            assert problem["type"] == "urn:flipwatch:problem:not-ready"
            assert str(token) in problem["detail"]
        # The same reason a second time: a few tries lie between.
        time.sleep(1)
        assert process.poll() is None
        token.write_text(PROBE_TOKEN)
        assert _status(client, "/readyz", 200).json()["status"] == "ready"
        assert "flipwatch_up" in client.get("/metrics").text
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert len([line for line in log.splitlines() if line.startswith("flipwatch: ")]) == 1


@pytest.mark.parametrize("variables", [{"FLIPWATCH_SCAN__DUTY": "7"}, {"FLIPWATCH_LISTEN_PORT": "many"}])
def test_it_ends_when_it_is_told_to(variables: dict[str, str]) -> None:
    """SIGTERM ends it with code 0 also while it waits, where it can listen and where it cannot."""
    with _staying("-m", "flipwatch.service.cli", "serve", "--stay", **variables) as (process, client):
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("flipwatch: The setting ")
        if "FLIPWATCH_LISTEN_PORT" not in variables:
            _status(client, "/livez", 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
