"""A real vLLM on loopback for the tests, as an operator would start it."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PROBE_TOKEN = "probe-token-of-the-tests"
# Before a command: it is told to end when the process of the tests is gone.
WITH_THE_TESTS = ("setpriv", "--pdeathsig", "TERM", "--")
# Importing takes most of a start; a busy machine takes longer.
START_SECONDS = 300

# vLLM loads this beside Flipwatch when its name stands in VLLM_PLUGINS: see probe_plugin.py.
TEST_PLUGIN = "flipwatch_tests"


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel hands out by itself.

    vLLM listens only once it has loaded, and meanwhile another test's server would be given a port of the kernel's.
    """
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def install_test_plugin(folder: Path) -> Path:
    """Make `probe_plugin.py` loadable as a vLLM plugin from `folder`, which goes on PYTHONPATH."""
    source = Path(__file__).parent / "probe" / "probe_plugin.py"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flipwatch_test_plugin.py").write_text(source.read_text())
    info = folder / "flipwatch_test_plugin-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flipwatch_test_plugin\nVersion: 0\n")
    entry = f"[vllm.general_plugins]\n{TEST_PLUGIN} = flipwatch_test_plugin:register\n"
    (info / "entry_points.txt").write_text(entry)
    return folder


def vllm_environment(**extra: str) -> dict[str, str]:
    """Environment of a small CPU server with the probe on."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One thread on any core.  By itself vLLM binds its threads, and two servers side by side to the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "flipwatch",
        "FLIPWATCH_PROBE_TOKEN": PROBE_TOKEN,
        "FLIPWATCH_FAULTS": "1",
        "FLIPWATCH_CPU_PLAIN_WEIGHTS": "1",
        **extra,
    }


@dataclass
class VllmServer:
    """One server process with all its children."""

    model: Path
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self._log = Path(tempfile.mkstemp(prefix="flipwatch-vllm-", suffix=".log")[1])
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(base_url=self.url, timeout=300)
        self.probe = httpx.Client(
            base_url=f"{self.url}/flipwatch/v1", headers={"Authorization": f"Bearer {PROBE_TOKEN}"}, timeout=300
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """All it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Process id of the API server."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> "VllmServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.client.close()
        self.probe.close()
        self._log.unlink()

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", "smol", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-model-len", "1024", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self.arguments],
                env=vllm_environment(**self.environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        # pytest-xdist may kill the process of the tests: the end of this pipe then ends the server with its children.
        self._guard = subprocess.Popen(
            ["sh", "-c", f"read _; kill -KILL -{self._process.pid}"], stdin=subprocess.PIPE, start_new_session=True
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(0.3)
        self.stop()
        raise AssertionError(f"vLLM did not start; the end of its log:\n{self.log[-4000:]}")

    def stop(self) -> None:
        """End it with its children."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._process = None
        assert self._guard is not None
        with self._guard:
            self._guard.kill()

    # --- what the tests ask of it -----------------------------------------------------------------------------

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text."""
        reply = self.client.post("/tokenize", json={"model": "smol", "prompt": text})
        return [int(token) for token in reply.json()["tokens"]]

    def complete(self, prompt: str | list[int], count: int = 16, **options: Any) -> dict[str, Any]:
        """One greedy completion with logprobs, as vLLM answers it."""
        body = {"model": "smol", "prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 0, **options}
        reply = self.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json()["choices"][0])

    def outputs(self, prompts: Sequence[str | list[int]], count: int = 8) -> list[Any]:
        """Greedy tokens and logprobs of several prompts, one at a time so that the batch never differs."""
        choices = [self.complete(prompt, count) for prompt in prompts]
        return [
            (choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]) for choice in choices
        ]

    def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probability of each token but the first, by vLLM's own path."""
        choice = self.complete(tokens, 1, prompt_logprobs=0)
        return [
            float(entry[str(token)]["logprob"])
            for entry, token in zip(choice["prompt_logprobs"][1:], tokens[1:], strict=True)
        ]

    def facts(self) -> dict[str, Any]:
        """`ModelFacts`."""
        reply = self.probe.get("/model")
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def self_test(self) -> dict[str, Any]:
        """Run the gates' self-test."""
        reply = self.probe.post("/self-test")
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def gates(self, alphas: dict[int, float]) -> httpx.Response:
        """Ask for gates."""
        gates = [{"block": block, "alpha": alpha} for block, alpha in alphas.items()]
        return self.probe.put("/gates", json={"boot_id": self.facts()["boot_id"], "gates": gates})

    def set_gates(self, alphas: dict[int, float]) -> dict[str, Any]:
        """Set gates; they must be taken."""
        reply = self.gates(alphas)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def inject(self, **order: Any) -> str:
        """Damage a tensor; returns the fault's id."""
        reply = self.probe.post("/faults", json=order)
        assert reply.status_code == 201, reply.text
        return str(reply.json()["id"])

    def heal(self, fault: str) -> None:
        """Take a fault back."""
        assert self.probe.delete(f"/faults/{fault}").status_code == 204

    def measure(
        self,
        tokens: list[list[int]],
        alphas: Sequence[float] = (),
        steps: int = 20,
        engine: int | None = None,
        **order: Any,
    ) -> dict[str, Any]:
        """A whole alpha-scan reading over these sequences; of one engine where there are several."""
        plan = {"alphas": list(alphas), "tokens": tokens, "scored_from": [1] * len(tokens), "tokens_per_step": 512}
        return self.reading("alpha_scan", plan, steps, engine, **order)

    def reading(
        self, monitor: str, plan: dict[str, Any], steps: int = 20, engine: int | None = None, **order: Any
    ) -> dict[str, Any]:
        """A whole measurement, so many steps at a time."""
        reply = self.probe.post("/measurements", json={"monitor": monitor, "plan": plan, "engine": engine, **order})
        assert reply.status_code == 201, reply.text
        progress = reply.json()
        while progress["reading"] is None:
            reply = self.probe.post(f"/measurements/{progress['id']}/advance", json={"steps": steps})
            assert reply.status_code == 200, reply.text
            progress = reply.json()
        return dict(progress["reading"])

    def integrity(self) -> dict[str, Any]:
        """`IntegrityFacts`."""
        reply = self.probe.get("/integrity")
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def sweep(self, steps: int = 64) -> list[dict[str, Any]]:
        """`RankReading` of each rank."""
        return list(self.reading("fingerprint", {"steps": 256}, steps)["ranks"])

    def repair(self, chunks: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """`RepairReport` for chunks of (rank, chunk)."""
        order = {
            "boot_id": self.facts()["boot_id"],
            "chunks": [{"rank": rank, "chunk": chunk} for rank, chunk in chunks],
        }
        reply = self.probe.post("/repairs", json=order)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())
