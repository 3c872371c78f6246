"""Two vLLM servers side by side, one plain and one with Flipwatch, and the sidecar of the second.

All are on loopback; each server computes on one thread.
"""

import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import serving_plain

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deploy" / "demo"))
from pair import Server, be_stoppable, free_port  # noqa: F401 - for those who need not know where the demo lies

NAME = "served"
_START_SECONDS = 400
_SIDECAR_SECONDS = 120


@dataclass
class Sides:
    """Both servers, running; `plain` and `flipwatch` are their URLs."""

    folder: Path
    token: str
    servers: dict[str, Server]
    urls: dict[str, str]
    _numbers: int = field(default=0, init=False)

    @contextmanager
    def sidecar(self, settings: dict[str, Any]) -> Iterator["Sidecar"]:
        """A sidecar of the watched server, with nothing remembered from another one."""
        self._numbers += 1
        folder = self.folder / f"sidecar-{self._numbers}"
        folder.mkdir()
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        configuration = folder / "flipwatch.yaml"
        known = {"listen_port": port, "data_dir": str(folder / "data"), "vllm": {"url": self.urls["flipwatch"]}}
        configuration.write_text(json.dumps(known | settings))  # JSON is YAML
        process = Server(
            name="flipwatch serve",
            command=[sys.executable, "-m", "flipwatch.service.cli", "serve", "--config", str(configuration)],
            environment={"FLIPWATCH_PROBE_TOKEN": self.token},
            log=folder / "flipwatch.log",
            ready_url=url + "/livez",
        )
        try:
            process.start()
            process.wait_ready(_SIDECAR_SECONDS)
            sidecar = Sidecar(url)
            sidecar.wait_until("flipwatch_up", 1.0)
            yield sidecar
        finally:
            process.stop()


@dataclass
class Sidecar:
    """A running sidecar, by its metrics."""

    url: str

    def metrics(self) -> dict[str, float]:
        """One scrape, `name{labels}` -> value."""
        text = httpx.get(self.url + "/metrics", timeout=30.0, trust_env=False).text
        lines = (line for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def held(self) -> tuple[float, float]:
        """Parts of scans and sweeps, and the seconds for which they held the engine."""
        metrics = self.metrics()
        parts = sum(metrics[f"flipwatch_{what}_parts_total"] for what in ("scan", "sweep"))
        held = sum(metrics[f"flipwatch_{what}_held_seconds_total"] for what in ("engine", "sweep"))
        return parts, held

    def wait_until(self, name: str, value: float) -> None:
        """Wait until a metric has reached a value; raises `TimeoutError`."""
        deadline = time.monotonic() + _SIDECAR_SECONDS
        while self.metrics().get(name, 0.0) < value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not reach {value:g}.")
            time.sleep(0.2)


@contextmanager
def sides(model: Path, mode: str, cache: Path) -> Iterator[Sides]:
    """Both servers, started one after the other; raises `pair.StartFailed`."""
    token = secrets.token_urlsafe(24)
    folder = cache / f"run-{secrets.token_hex(4)}"
    (folder / "plugin").mkdir(parents=True)
    serving_plain.install(folder / "plugin")
    servers, urls = {}, {}
    try:
        for side in ("plain", "flipwatch"):
            port = free_port()
            urls[side] = f"http://127.0.0.1:{port}"
            gated = side == "flipwatch"
            environment = serving_plain.environment(folder / "plugin", token if gated else None)
            environment |= {
                "VLLM_CACHE_ROOT": str(cache / f"{mode}-{gated}" / "vllm"),
                "TORCHINDUCTOR_CACHE_DIR": str(cache / f"{mode}-{gated}" / "inductor"),
            }
            servers[side] = Server(
                name=f"vLLM ({side})",
                command=[
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                    *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)),
                    *("--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "8"),
                    *("--max-num-batched-tokens", "1024", "--no-enable-prefix-caching"),
                    *(["--enforce-eager"] if mode == "eager" else []),
                ],
                environment=environment,
                log=folder / f"{side}.log",
                ready_url=urls[side] + "/health",
            )
            servers[side].start()
        for server in servers.values():
            server.wait_ready(_START_SECONDS)
        yield Sides(folder, token, servers, urls)
    finally:
        for server in servers.values():
            server.stop()
