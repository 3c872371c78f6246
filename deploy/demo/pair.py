"""A real vLLM and a real `flipwatch serve` on loopback, for `make demo` and `make up`.

Server          one child process with its log
Pair            vLLM and the sidecar beside it
NotPossible     nothing was started: the message is one line
StartFailed     a server did not come up; the message ends with the tail of its log
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / ".venv" / "model"
SERVED_NAME = "smol"

_VLLM_START_SECONDS = 300
_SIDECAR_START_SECONDS = 60
_STOP_SECONDS = 20


class NotPossible(Exception):
    """The pair cannot be started here; nothing was."""


class StartFailed(Exception):
    """A server did not come up."""


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """One child process in a process group of its own, with its output in `log`."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    ready_url: str
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Start the process; returns at once."""
        # Variables of the caller's shell must not reach into the demo.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FLIPWATCH_", "VLLM_"))}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(  # noqa: S603 - our own command
                self.command,
                env=inherited | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float) -> None:
        """Wait until `ready_url` answers 200.  Raises `StartFailed`."""
        assert self.process is not None  # noqa: S101 - started before
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StartFailed(f"{self.name} ended with code {self.process.returncode} at its start.\n{self.tail()}")
            try:
                if httpx.get(self.ready_url, timeout=2.0, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise StartFailed(f"{self.name} was not ready within {seconds:.0f} s.\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """The end of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        shown = "\n".join("  | " + line for line in text.splitlines()[-lines:])
        return f"The last lines of {self.log}:\n{shown}"

    def stop(self) -> None:
        """End the process and its children; no-op when it is not running."""
        if self.process is None:
            return
        stop_group(self.process.pid)
        self.process.wait()
        self.process = None


def stop_group(leader: int) -> None:
    """End the process group `leader`: ask, wait, then kill what is left."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(leader, sign)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline:
            if not _alive(leader):
                return
            time.sleep(0.1)


def _alive(group: int) -> bool:
    """Whether the group has a process that is no zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # ended meanwhile
        if int(its_group) == group and state != "Z":
            return True
    return False


@dataclass
class Pair:
    """vLLM and the sidecar.  `with Pair(...) as pair` starts both and stops both.

    `folder` takes logs, the sidecar's data and its configuration.  `settings` are added to the sidecar's.
    """

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    vllm_port: int = field(default_factory=free_port)
    sidecar_port: int = field(default_factory=free_port)
    probe_token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def __post_init__(self) -> None:
        self.vllm_url = f"http://127.0.0.1:{self.vllm_port}"
        self.sidecar_url = f"http://127.0.0.1:{self.sidecar_port}"
        self.vllm = Server(
            name="vLLM",
            command=[
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(MODEL), "--served-model-name", SERVED_NAME),
                *("--host", "127.0.0.1", "--port", str(self.vllm_port)),
                *("--max-model-len", "512", "--max-num-seqs", "8"),
            ],
            environment={
                "VLLM_PLUGINS": "flipwatch",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                # On CPU vLLM 0.32 writes AOT artefacts that it cannot load again: half a minute of each start.
                "VLLM_USE_AOT_COMPILE": "0",
                "FLIPWATCH_PROBE_TOKEN": self.probe_token,
                "FLIPWATCH_FAULTS": "1",
                "FLIPWATCH_CPU_PLAIN_WEIGHTS": "1",
            },
            log=self.folder / "vllm.log",
            ready_url=self.vllm_url + "/health",
        )
        self.sidecar = Server(
            name="flipwatch serve",
            command=[sys.executable, "-m", "flipwatch.service.cli", "serve", "--config", str(self.configuration)],
            environment={"FLIPWATCH_PROBE_TOKEN": self.probe_token},
            log=self.folder / "flipwatch.log",
            ready_url=self.sidecar_url + "/livez",
        )

    @property
    def configuration(self) -> Path:
        """The sidecar's YAML file."""
        return self.folder / "flipwatch.yaml"

    def check(self) -> None:
        """Raise `NotPossible` when the model is missing or a port is taken.  Call it before anything starts."""
        if not (MODEL / "config.json").is_file():
            raise NotPossible(f"There is no model in {MODEL}: run `make setup`.")
        for port in (self.vllm_port, self.sidecar_port):
            _refuse_taken_port(port)

    def start_vllm(self) -> None:
        """Start vLLM and wait until it serves."""
        self.vllm.start()
        self.vllm.wait_ready(_VLLM_START_SECONDS)

    def start_sidecar(self) -> None:
        """Write the sidecar's configuration, start it, wait until it lives."""
        settings = {
            "listen_port": self.sidecar_port,
            "data_dir": str(self.folder / "data"),
            "vllm": {"url": self.vllm_url},
            "tokens": [{"name": "demo", "token": self.token, "scopes": ["read", "mitigate", "admin"]}],
            "faults": {"enabled": True},
            **self.settings,
        }
        (self.folder / "data").mkdir(exist_ok=True)
        self.configuration.touch(mode=0o600)
        self.configuration.write_text(json.dumps(settings, indent=2))  # JSON is YAML
        self.sidecar.start()
        self.sidecar.wait_ready(_SIDECAR_START_SECONDS)

    def stop(self) -> None:
        """Stop both."""
        self.sidecar.stop()
        self.vllm.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _refuse_taken_port(port: int) -> None:
    with socket.socket() as probe:
        probe.settimeout(2.0)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise NotPossible(f"Port {port} on 127.0.0.1 is taken: stop what listens there, or choose another.")


def be_stoppable() -> None:
    """Let SIGTERM and SIGHUP unwind the program as Ctrl-C does, so that no child outlives it."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
