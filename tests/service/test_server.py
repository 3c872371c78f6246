"""`serve` as a process: one line and code 2 when it cannot start, clean end, no token in its log."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..vllm_server import free_port
from .fake_server import PROBE_TOKEN, FakeServer

RUN = (
    "import sys; from flipwatch.service.settings import load_settings; from flipwatch.service.server import serve; "
    + ("sys.exit(serve(load_settings()))")
)


def _environment(server: FakeServer, folder: Path, port: int, **more: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FLIPWATCH_")}
    return plain | {
        "FLIPWATCH_VLLM__URL": server.url,
        "FLIPWATCH_PROBE_TOKEN": PROBE_TOKEN,
        "FLIPWATCH_DATA_DIR": str(folder / "data"),
        "FLIPWATCH_LISTEN_PORT": str(port),
        "FLIPWATCH_SCAN__DUTY": "1.0",
        "FLIPWATCH_TOKENS": '[{"name": "boss", "token": "token-of-the-boss", "scopes": ["admin"]}]',
        **more,
    }


@contextmanager
def _started(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()


def _answers(url: str, process: subprocess.Popen[str]) -> None:
    """Wait until the server answers; it is another process, so there is nothing to await but the answer."""
    end = time.monotonic() + 30
    while time.monotonic() < end and process.poll() is None:
        try:
            httpx.get(url + "/livez", trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.05)
    pytest.fail(f"no answer; exit code {process.poll()}")


def test_it_serves_logs_json_without_tokens_and_ends_cleanly(server: FakeServer, tmp_path: Path) -> None:
    """A process from start to SIGTERM: requests with good and bad tokens leave none of them in its log."""
    port = free_port()
    environment = _environment(server, tmp_path, port, FLIPWATCH_LOG_LEVEL="debug", FLIPWATCH_VLLM__POLL_SECONDS="0.2")
    url = f"http://127.0.0.1:{port}"
    with _started(environment) as process:
        _answers(url, process)
        for token in ("token-of-the-boss", "token-of-a-thief"):
            httpx.get(url + "/v1/states", headers={"authorization": f"Bearer {token}"}, trust_env=False)
            httpx.post(url + "/v1/scans", json={}, headers={"authorization": f"Bearer {token}"}, trust_env=False)
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    lines = [json.loads(line) for line in log.splitlines()]
    assert "listening" in [line["event"] for line in lines]
    for secret in (PROBE_TOKEN, "token-of-the-boss", "token-of-a-thief"):
        assert secret not in log
    assert "Traceback" not in log


def test_a_reader_behind_a_proxy_on_this_host_needs_a_token(server: FakeServer, tmp_path: Path) -> None:
    """As long as the proxy says whom it speaks for; one that does not is this host itself."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with _started(_environment(server, tmp_path, port)) as process:
        _answers(url, process)
        forwarded = {"x-forwarded-for": "192.0.2.7"}
        assert httpx.get(url + "/v1/states", headers=forwarded, trust_env=False).status_code == 401
        boss = {"authorization": "Bearer token-of-the-boss"}
        assert httpx.get(url + "/v1/states", headers=forwarded | boss, trust_env=False).status_code == 200
        assert httpx.get(url + "/v1/states", trust_env=False).status_code == 200


def test_a_taken_port_is_one_line_and_code_2(server: FakeServer, tmp_path: Path) -> None:
    """The line names the port and what to do."""
    with _started(_environment(server, tmp_path, server.port)) as process:
        out, log = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert len(log.splitlines()) == 1
    assert f"127.0.0.1:{server.port}" in log


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FLIPWATCH_PROBE_TOKEN", "", "probe token is empty"),
        ("FLIPWATCH_VALIDATION__FILE", "/nowhere.jsonl", "validation.file cannot be used"),
        ("FLIPWATCH_DATA_DIR", "/dev/null/data", "data_dir names"),
        ("FLIPWATCH_LISTEN_HOST", "..", "cannot listen on ..:"),
        ("FLIPWATCH_AUTOMATION__POLICY_FILE", "/dev/null", "must hold a list of rules"),
    ],
)
def test_a_start_that_is_not_possible_is_one_line_and_code_2(
    server: FakeServer, tmp_path: Path, name: str, value: str, words: str
) -> None:
    """Missing token, missing file, impossible folder."""
    with _started(_environment(server, tmp_path, free_port(), **{name: value})) as process:
        out, log = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert len(log.splitlines()) == 1
    assert words in log


def test_a_second_sidecar_on_the_same_store_does_not_start(server: FakeServer, tmp_path: Path) -> None:
    """Two sidecars with the same memory would undo each other."""
    port = free_port()
    with _started(_environment(server, tmp_path, port)) as first:
        _answers(f"http://127.0.0.1:{port}", first)
        with _started(_environment(server, tmp_path, free_port())) as second:
            _, log = second.communicate(timeout=60)
        assert second.returncode == 2
        assert len(log.splitlines()) == 1


@pytest.mark.parametrize("way", ["finish", "undo"])
def test_a_sidecar_killed_in_the_middle_of_a_mitigation_comes_back(
    server: FakeServer, tmp_path: Path, way: str
) -> None:
    """Killed by signal 9 after the gates were written: the next start shows it, and can finish or undo it."""
    server.hold_after_gates = True
    boss = {"authorization": "Bearer token-of-the-boss"}
    port = free_port()
    environment = _environment(
        server, tmp_path, port, FLIPWATCH_MITIGATION__MODE="enforce", FLIPWATCH_SCAN__EVERY_MINUTES="null"
    )
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, headers=boss, trust_env=False) as client, _started(environment) as first:
        _answers(url, first)
        _until(client, "/v1/states", lambda states: states["mitigation"]["offered"])
        path = client.post("/v1/mitigations", json={"action": "skip", "blocks": [4]}).headers["location"]
        assert server.holding.wait(30)
        first.kill()
    server.hold_after_gates = False
    server.release()
    assert server.gates[4] == 0.0
    with httpx.Client(base_url=url, headers=boss, trust_env=False) as client, _started(environment) as second:
        _answers(url, second)
        _until(client, path, lambda record: record["state"] == "interrupted")
        if way == "finish":
            assert client.post(f"{path}/finish").status_code == 202
            _until(client, path, lambda record: record["state"] == "active")
            assert server.gates[4] == 0.0
        else:
            assert client.delete(path).status_code == 202
            _until(client, path, lambda record: record["state"] == "reverted")
            assert server.gates == [1.0] * 8


def _until(client: httpx.Client, path: str, met: Callable[[dict[str, Any]], bool]) -> None:
    """Ask the other process until it says so."""
    end = time.monotonic() + 30
    while True:
        answer = client.get(path).json()
        if met(answer):
            return
        if time.monotonic() > end:
            pytest.fail(f"{path} stays at {answer}")
        time.sleep(0.05)
