"""A real `flipwatch serve` beside a real vLLM, and a receiver for its alerts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx

from ..vllm_server import PROBE_TOKEN, WITH_THE_TESTS, free_port

TOKEN = "operator-token-of-the-tests"
T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T | None], seconds: float = 300) -> T:
    """Look until there is something; a scan of 30 blocks alone took two minutes on two busy cores."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = look()
        if seen is not None and seen is not False:
            return seen
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen within {seconds} s")


class Webhook:
    """Keeps every alert that it receives."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        alerts = self.alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                alerts.extend(json.loads(self.rfile.read(int(self.headers["content-length"])))["alerts"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def seen(self, name: str, status: str, block: int | None = None) -> bool:
        """Such an alert came in."""
        return any(
            alert["labels"]["alertname"] == name
            and alert["status"] == status
            and (block is None or alert["labels"].get("block") == str(block))
            for alert in self.alerts
        )


class Sidecar:
    """The process, and the operator's way to talk to it."""

    def __init__(self, folder: Path, vllm_url: str, webhook: Webhook, **settings: Any) -> None:
        self.port = free_port()
        self.log = folder / "flipwatch.log"
        self._configuration = folder / "flipwatch.yaml"
        (folder / "data").mkdir()
        everything = {
            "listen_port": self.port,
            "data_dir": str(folder / "data"),
            "vllm": {"url": vllm_url, "poll_seconds": 0.5},
            "tokens": [{"name": "operator", "token": TOKEN, "scopes": ["admin"]}],
            "scan": {"every_minutes": None, "every_requests": 5, "grid": "quick", "part_budget_ms": 1000, "duty": 1.0},
            "fingerprint": {"every_minutes": None},
            "canary": {"every_minutes": None},
            "validation": {"max_items": 8, "max_tokens": 24},
            "alerts": {"k": 1, "n": 1, "webhook_url": webhook.url},
            "mitigation": {"mode": "enforce"},
            "faults": {"enabled": True},
            **settings,
        }
        self._configuration.write_text(json.dumps(everything))
        self._process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
        )

    def start(self) -> None:
        """Start it and wait until it lives."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("FLIPWATCH_")}
        serve = (sys.executable, "-m", "flipwatch.service.cli", "serve")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*WITH_THE_TESTS, *serve, "--config", str(self._configuration)],
                env={**plain, "FLIPWATCH_PROBE_TOKEN": PROBE_TOKEN},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

        def lives() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            try:
                return self.client.get("/livez").status_code == 200
            except httpx.TransportError:
                return False

        wait_for("the start of the sidecar", lives)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End the process; its exit code."""
        assert self._process is not None
        self._process.send_signal(how)
        code = self._process.wait(30)
        self._process = None
        return code

    def close(self) -> None:
        """End it if it runs."""
        if self._process is not None:
            self.end()
        self.client.close()

    def call(self, method: str, path: str, body: Any = None, status: int | None = None) -> Any:
        """One request under /v1 and its JSON."""
        reply = self.client.request(method, f"/v1{path}", json=body)
        wanted = reply.is_success if status is None else reply.status_code == status
        assert wanted, f"{method} {path}: {reply.status_code} {reply.text}"
        return reply.json() if reply.content else None

    def state(self) -> dict[str, Any]:
        """The state of the alpha-scan."""
        states = self.call("GET", "/states")
        (state,) = [state for state in states["states"] if state["monitor"] == "alpha_scan"]
        return dict(state)

    def scan(self, path: str = "/scans", **order: Any) -> dict[str, Any]:
        """One scan now, or with `/baselines` one that becomes the clean profile; its finding."""
        # One that the sidecar started by itself may be under way.
        wait_for("an idle sidecar", lambda: not self.call("GET", "/states")["scanning"])
        scan = self.call("POST", path, order, 202)

        def done() -> dict[str, Any] | None:
            record = self.call("GET", f"/scans/{scan['id']}")
            return record if record["state"] in ("done", "failed") else None

        record = wait_for("the end of the scan", done)
        assert record["state"] == "done", record
        assert record["profile_refusal"] is None
        return dict(record["finding"])

    def mitigation(self, id: str, *states: str) -> dict[str, Any]:
        """Wait until a mitigation is in one of these states."""

        def there() -> dict[str, Any] | None:
            record = self.call("GET", f"/mitigations/{id}")
            return record if record["state"] in states else None

        return dict(wait_for(f"mitigation {' or '.join(states)}", there))

    def metric(self, name: str) -> float | None:
        """Value of a sample by its name with labels, None when it is absent."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        return None
