"""Debian's Prometheus and Alertmanager on loopback, with the repository's own configuration at the pace of a test, and
a fake of dcgm-exporter."""

import json
import shutil
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml

from ..vllm_server import WITH_THE_TESTS, free_port
from .sidecar import TOKEN, wait_for

JSON = dict[str, Any]

_ROOT = Path(__file__).parents[2]
PROMETHEUS = _ROOT / "deploy" / "prometheus" / "prometheus.yml"
RULES = _ROOT / "helm" / "flipwatch" / "files" / "rules.yaml"
ALERTMANAGER = _ROOT / "deploy" / "alertmanager" / "alertmanager.yml"

# What the targets of one server share, as in Kubernetes.
SERVER = {"namespace": "models", "pod": "smol-0", "node": "gpu-node-1"}


def program(name: str) -> str:
    """Path of a program of Debian; a missing one is an error, not a skip."""
    path = shutil.which(name)
    assert path is not None, (
        f"{name} is missing: apt-get install -y --no-install-recommends prometheus prometheus-alertmanager"
    )
    return path


class Process:
    """A program that listens on a port of loopback and says at /-/ready that it works."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*WITH_THE_TESTS, program(name), *arguments, f"--web.listen-address=127.0.0.1:{port}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def get(self, path: str, **parameters: str) -> Any:
        """The JSON that answers a GET, on a connection of its own."""
        reply = httpx.get(f"{self.url}{path}", params=parameters, timeout=30)
        assert reply.status_code == 200, f"{path} {parameters}: {reply.status_code} {reply.text}"
        return reply.json()

    def ready(self) -> None:
        """Wait until it works."""

        def answers() -> bool:
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            try:
                return httpx.get(f"{self.url}/-/ready", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(f"the start of {self.url}", answers)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


def alertmanager(folder: Path, sidecar: int, port: int) -> Process:
    """With the repository's example, a route to `/skip` added to it, and seconds in place of its minutes."""
    token = folder / "token"
    token.write_text(TOKEN)
    configuration = yaml.safe_load(ALERTMANAGER.read_text(encoding="utf-8"))
    [repair] = [receiver for receiver in configuration["receivers"] if "webhook_configs" in receiver]
    [hook] = repair["webhook_configs"]
    assert hook["url"].endswith("/v1/alertmanager/repair")
    hook["url"] = f"http://127.0.0.1:{sidecar}/v1/alertmanager/repair"
    hook["http_config"]["authorization"]["credentials_file"] = str(token)
    skip = {**hook, "url": f"http://127.0.0.1:{sidecar}/v1/alertmanager/skip"}
    configuration["receivers"].append({"name": "flipwatch-skip", "webhook_configs": [skip]})
    to_skip = {
        "receiver": "flipwatch-skip",
        "matchers": ["alertname = FlipwatchVerdict", "verdict = weight_fault"],
        "continue": True,
    }
    route = configuration["route"]
    route["routes"].insert(0, to_skip)
    for each in (route, *route["routes"]):
        each |= {"group_wait": "1s", "group_interval": "5s"}
    file = folder / "alertmanager.yml"
    file.write_text(json.dumps(configuration))
    arguments = [f"--config.file={file}", f"--storage.path={folder / 'alerts'}", "--cluster.listen-address="]
    return Process(folder, "prometheus-alertmanager", arguments, port)


def prometheus(folder: Path, sidecar: int, vllm: int, dcgm: int, alerts: int, port: int) -> Process:
    """With the repository's configuration and rules, everything once a second, and two seconds for every `for`."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule |= {key: "2s" for key in ("for", "keep_firing_for") if key in rule}
    (folder / "rules.yml").write_text(json.dumps(rules))
    configuration = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    assert configuration["rule_files"] == ["rules.yml"]
    ports = {"flipwatch": sidecar, "vllm": vllm, "prometheus": port}
    for job in configuration["scrape_configs"]:
        labels = {} if job["job_name"] == "prometheus" else SERVER
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"], "labels": labels}]
    configuration["scrape_configs"].append({"job_name": "dcgm", "static_configs": [{"targets": [f"127.0.0.1:{dcgm}"]}]})
    configuration["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alerts}"]}]}]}
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(configuration))
    arguments = [
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'series'}",
        "--storage.tsdb.retention.time=1h",
    ]
    return Process(folder, "prometheus", arguments, port)


class FakeDcgm:
    """A fake of dcgm-exporter: there is no GPU here.  One that has met Xid 63, in the pod of this server."""

    TEXT = (
        "# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.\n"
        "# TYPE DCGM_FI_DEV_XID_ERRORS gauge\n"
        'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-0",device="nvidia0",modelName="fake",'
        f'Hostname="{SERVER["node"]}",namespace="{SERVER["namespace"]}",pod="{SERVER["pod"]}",container="vllm"}} 63\n'
    ).encode()

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # On a busy machine Prometheus may have given up.
                with suppress(BrokenPipeError):
                    self.send_response(200)
                    self.send_header("content-type", "text/plain; version=0.0.4")
                    self.end_headers()
                    self.wfile.write(FakeDcgm.TEXT)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Stack:
    """All three, started and ready; `close` ends them."""

    def __init__(self, folder: Path, sidecar: int, vllm: int) -> None:
        ports = free_port(), free_port()
        self.dcgm = FakeDcgm()
        self.alertmanager = alertmanager(folder, sidecar, ports[0])
        self.prometheus = prometheus(folder, sidecar, vllm, self.dcgm.port, *ports)

    def ready(self) -> None:
        """Wait until all targets were scraped and Alertmanager is known."""
        self.alertmanager.ready()
        self.prometheus.ready()
        wait_for("the first scrapes", lambda: len(self.query("up == 1")) == 4)
        found = "/api/v1/alertmanagers"
        wait_for("Alertmanager", lambda: bool(self.prometheus.get(found)["data"]["activeAlertmanagers"]))

    def close(self) -> None:
        """End all of them."""
        self.prometheus.close()
        self.alertmanager.close()
        self.dcgm.close()

    def query(self, expression: str) -> list[JSON]:
        """The result of an instant query, now."""
        return list(self.prometheus.get("/api/v1/query", query=expression)["data"]["result"])

    def over(self, expression: str, begin: float, end: float) -> list[JSON]:
        """The result of a range query between two moments, epoch seconds, each second."""
        answer = self.prometheus.get("/api/v1/query_range", query=expression, start=f"{begin}", end=f"{end}", step="1")
        return list(answer["data"]["result"])

    def firing(self, *names: str) -> bool:
        """Whether an alert of one of these names fires in Prometheus."""
        alerts = self.prometheus.get("/api/v1/alerts")["data"]["alerts"]
        return any(alert["state"] == "firing" and alert["labels"]["alertname"] in names for alert in alerts)

    def active(self, *names: str) -> bool:
        """Whether an alert of one of these names is active in Alertmanager, inhibited ones included."""
        alerts = self.alertmanager.get("/api/v2/alerts", active="true")
        return any(alert["labels"]["alertname"] in names for alert in alerts)
