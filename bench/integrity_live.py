"""A vLLM server of its own under load: sweeps over HTTP, and the time from detection to the first clean token.

The server runs as in `make demo`, but eager.  Clients keep streams open all the time; a fault goes in by the
probe's own route, a sweep finds it, a repair puts it right.
"""

import json
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from flipwatch.monitors.fingerprint.facts import RankReading, RepairReport
from flipwatch.monitors.wire import PREFIX

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deploy" / "demo"))
from pair import Server, free_port

PARTS = 16
"""A sweep over HTTP is cut into so many requests."""
NAME = "served"


@dataclass
class Live:
    """The server and its clients."""

    url: str
    token: str
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)
        self.probe = httpx.Client(
            base_url=self.url + PREFIX, headers={"authorization": f"Bearer {self.token}"}, timeout=120, trust_env=False
        )

    def asked(self, method: str, path: str, **body: Any) -> Any:
        """One request to the probe; its JSON."""
        reply = self.probe.request(method, path, json=body or None)
        reply.raise_for_status()
        return reply.json() if reply.content else None

    def sweep(self) -> RankReading:
        """All chunks of the one rank."""
        progress = self.asked("POST", "/measurements", monitor="fingerprint", plan={"steps": PARTS})
        while progress["reading"] is None:
            progress = self.asked("POST", f"/measurements/{progress['id']}/advance", steps=1)
        return RankReading.model_validate(progress["reading"]["ranks"][0])

    def stream(self, prompt: str, count: int) -> Iterator[str]:
        """Greedy tokens of one request as they come."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True}
        with self.client.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


@contextmanager
def server(model: Path) -> Iterator[Live]:
    """A vLLM of its own; raises `StartFailed`."""
    token, port = secrets.token_urlsafe(24), free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        vllm = Server(
            name="vLLM",
            command=[
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
                *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8"),
            ],
            environment={
                "VLLM_PLUGINS": "flipwatch",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "FLIPWATCH_PROBE_TOKEN": token,
                "FLIPWATCH_FAULTS": "1",
                "FLIPWATCH_CPU_PLAIN_WEIGHTS": "1",
            },
            log=Path(folder) / "vllm.log",
            ready_url=url + "/health",
        )
        try:
            vllm.start()
            vllm.wait_ready(300)
            yield Live(url, token)
        finally:
            vllm.stop()


class Load:
    """Clients that stream one request after another; `with` it."""

    def __init__(self, live: Live, clients: int, tokens: int) -> None:
        self._live = live
        self._tokens = tokens
        self._end = threading.Event()
        self.arrivals: list[tuple[float, float]] = []
        """When a token came, and when its request began."""
        self.failures: list[str] = []
        self.requests = 0
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def _run(self, number: int) -> None:
        turn = 0
        while not self._end.is_set():
            began, turn = time.perf_counter(), turn + 1
            try:
                for _ in self._live.stream(f"Story {number}.{turn}: once upon a time", self._tokens):
                    self.arrivals.append((time.perf_counter(), began))
                self.requests += 1
            except (httpx.HTTPError, KeyError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def until_tokens(self) -> None:
        """Wait until each of the next few tokens has come."""
        known, deadline = len(self.arrivals), time.monotonic() + 120
        while len(self.arrivals) < known + 4 and time.monotonic() < deadline:
            time.sleep(0.01)

    def first_after(self, moment: float, begun_before: float) -> float:
        """Seconds from `moment` to the next token of a request that was under way at `begun_before`."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            later = [at - moment for at, began in list(self.arrivals) if at > moment and began < begun_before]
            if later:
                return min(later)
            time.sleep(0.002)
        raise TimeoutError("No request that was under way got another token.")

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


def run(model: Path, sweeps: int, repairs: int, clients: int, seed: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Healthy sweeps under load, then faults found and put right under load."""
    prompt = "The capital of France is"
    with server(model) as live:
        clean = list(live.stream(prompt, 16))
        alarms, sweep_seconds = 0, []
        with Load(live, clients, 64) as load:
            load.until_tokens()
            for _ in range(sweeps):
                began = time.perf_counter()
                reading = live.sweep()
                sweep_seconds.append(time.perf_counter() - began)
                alarms += bool(reading.bad_chunks or reading.replaced)
                tick()
        healthy_load = {"tokens": len(load.arrivals), "requests": load.requests, "failed_requests": load.failures[:5]}
        trials, same, damaged_differed = [], 0, 0
        for number in range(repairs):
            trial, output_damaged = _trial(live, clients, prompt, seed + number)
            trials.append(trial)
            damaged_differed += output_damaged != clean
            same += list(live.stream(prompt, 16)) == clean
            tick()
        afterwards = live.sweep()
    return {
        "threads": os.cpu_count(),
        "clients": clients,
        "sweeps": sweeps,
        "alarms": alarms,
        "sweep_seconds": sweep_seconds,
        **healthy_load,
        "trials": trials,
        "faults_that_changed_the_output": damaged_differed,
        "outputs_same_after_repair": same,
        "intact_afterwards": afterwards.bad_chunks == 0,
        "medians": {
            key: statistics.median(float(trial[key]) for trial in trials)
            for key in (trials[0] if trials else {})
            if key.endswith("_seconds")
        },
    }


def _trial(live: Live, clients: int, prompt: str, seed: int) -> tuple[dict[str, Any], list[str]]:
    """One fault under load, from the sweep that finds it to the next token of a request that was in flight."""
    boot_id = live.asked("GET", "/integrity")["boot_id"]
    with Load(live, clients, 64) as load:
        load.until_tokens()
        live.asked("POST", "/faults", block=12, tensor="mlp.down_proj", kind="bit", count=1, bit=14, seed=seed)
        output = list(live.stream(prompt, 16))
        began = time.perf_counter()
        reading = live.sweep()
        detected = time.perf_counter()
        chunks = [{"rank": reading.rank.rank, "chunk": bad.chunk} for bad in reading.bad]
        report = RepairReport.model_validate(live.asked("POST", "/repairs", boot_id=boot_id, chunks=chunks))
        repaired = time.perf_counter()
        token = load.first_after(repaired, detected)
        again = live.sweep()
    return {
        "found_chunks": len(chunks),
        "repaired": all(chunk.intact for chunk in report.chunks),
        "methods": [str(chunk.method) for chunk in report.chunks],
        "clean_sweep_after": again.bad_chunks == 0,
        "failed_requests": load.failures[:5],
        "sweep_seconds": detected - began,
        "detection_to_repair_seconds": repaired - detected,
        "paused_seconds": report.paused_seconds,
        "detection_to_token_seconds": repaired - detected + token,
    }, output
