"""The sidecar's image: built, run as it is meant to be run, and asked over HTTP."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from .engine import ROOT, Engine, pinned

MB = 1_000_000
_STARTED_WITHIN = 60


def get(url: str, token: str | None = None) -> tuple[int, str]:
    """Status and text of an answer; no proxy is asked."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Running:
    """A container of the sidecar, with a read-only root, without capabilities, on loopback."""

    def __init__(self, engine: Engine, image: str, folder: Path, *extra: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"flipwatch-test-{self.port}"
        self._engine = engine
        token = folder / "probe_token"
        if not token.exists():
            token.write_text("a probe token of this test\n")
            token.chmod(0o444)
        engine.podman(
            "run", "--detach", "--name", self.name, "--pull=never", "--no-healthcheck", "--network=host",
            "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000",
            "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt", "no-new-privileges",
            "--volume", f"{token}:/run/secrets/probe_token:ro",
            "--env", "FLIPWATCH_PROBE_TOKEN_FILE=/run/secrets/probe_token",
            "--env", f"FLIPWATCH_LISTEN_PORT={self.port}", "--env", f"FLIPWATCH_URL={self.url}", *extra, image,
        )  # fmt: skip

    def inside(self, *command: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program beside the sidecar."""
        return self._engine.podman("exec", self.name, *command, ok=ok)

    def python(self, code: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python code beside the sidecar."""
        return self.inside("python", "-c", code, ok=ok)

    def logs(self) -> str:
        """What it has printed."""
        done = self._engine.podman("logs", self.name)
        return done.stdout + done.stderr

    def exit_code(self) -> int:
        """Wait for its end."""
        return int(self._engine.podman("wait", self.name).stdout)

    def send(self, signal: str) -> None:
        """Send a signal to its first process."""
        self._engine.podman("kill", "--signal", signal, self.name)

    def wait_until_alive(self) -> float:
        """Until /livez answers; the seconds that took."""
        start = time.monotonic()
        while time.monotonic() < start + _STARTED_WITHIN:
            try:
                if get(f"{self.url}/livez")[0] == 200:
                    return time.monotonic() - start
            except OSError:
                time.sleep(0.1)
        raise AssertionError(self.logs())

    def remove(self) -> None:
        """Leave nothing of it."""
        self._engine.podman("rm", "--force", "--time", "1", self.name, ok=False)


@pytest.fixture(scope="module")
def running(engine: Engine, sidecar: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A sidecar with a volume for its data, which knows a probe token and finds no vLLM."""
    container = Running(engine, sidecar, tmp_path_factory.mktemp("secrets"), "--volume", "data:/var/lib/flipwatch")
    try:
        print(f"\nalive {container.wait_until_alive():.1f} s after its start was asked for")
        yield container
    finally:
        container.remove()


def test_lives_and_shows_metrics(running: Running) -> None:
    """/livez and /metrics answer over HTTP without a vLLM, and the metrics say that there is none."""
    assert get(f"{running.url}/livez")[0] == 200
    status, text = get(f"{running.url}/metrics")
    assert status == 200
    assert "\nflipwatch_up 0.0\n" in text


def test_runs_as_a_high_uid_without_rights(running: Running) -> None:
    """The server is uid 65532, has no capability, and can get none."""
    status = dict(
        line.split(":\t", 1) for line in running.inside("cat", "/proc/1/status").stdout.splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == ["65532"] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert running.inside("id", "-u").stdout.strip() == "65532"


def test_root_is_read_only_and_data_is_kept(running: Running) -> None:
    """Nothing can be written to / or into the installed program; the store lies in the volume."""
    for place in ("/new", "/opt/flipwatch/new", "/etc/new"):
        done = running.python(f"open({place!r}, 'w')", ok=False)
        assert done.returncode == 1
        assert "Read-only file system" in done.stderr
    assert ".db" in running.python("import os; print(os.listdir('/var/lib/flipwatch'))").stdout


@pytest.mark.parametrize("module", ["torch", "vllm", "numpy", "pip", "setuptools"])
def test_has_no_such_module(running: Running, module: str) -> None:
    """Neither the big ones nor what only a build needs."""
    done = running.python(f"import {module}", ok=False)
    assert done.returncode == 1
    assert f"No module named '{module}'" in done.stderr


def test_health_check_of_the_image_tells_alive_from_dead(engine: Engine, sidecar: str, running: Running) -> None:
    """The HEALTHCHECK command, as the image has it, passes here and fails where nobody listens."""
    kind, *command = engine.config(sidecar)["config"]["Healthcheck"]["Test"]
    assert kind == "CMD"
    assert running.inside(*command, ok=False).returncode == 0
    assert running.inside("env", "FLIPWATCH_URL=http://127.0.0.1:9", *command, ok=False).returncode == 1


def test_needs_little_memory(running: Running) -> None:
    """Its peak is under half of what deploy/compose.yaml allows it (512 MiB)."""
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", running.inside("cat", "/proc/1/status").stdout).group(1)) // 1024
    print(f"\npeak of resident memory {peak} MiB")
    assert peak < 256


def test_program_is_the_entry_point(engine: Engine, sidecar: str) -> None:
    """Arguments are those of `flipwatch`, also with a read-only root and no volume."""
    done = engine.podman(
        "run", "--rm", "--pull=never", "--no-healthcheck", "--network=host", "--ulimit", "nofile=1024:1024",
        "--ulimit", "nproc=1000:1000", "--read-only", "--cap-drop=ALL", sidecar, "serve", "--help",
    )  # fmt: skip
    assert "--config" in done.stdout


def test_says_so_when_the_data_cannot_be_written(engine: Engine, sidecar: str, tmp_path: Path) -> None:
    """Without a volume on a read-only root it ends with code 2 and one sentence."""
    container = Running(engine, sidecar, tmp_path)
    try:
        assert container.exit_code() == 2
        said = [line for line in container.logs().splitlines() if line.startswith("flipwatch: ")]
        assert len(said) == 1
        assert "/var/lib/flipwatch" in said[0]
        assert "Traceback" not in container.logs()
    finally:
        container.remove()


def test_another_uid_of_group_0_will_do(engine: Engine, sidecar: str, tmp_path: Path) -> None:
    """Platforms that choose the uid themselves give it group 0."""
    container = Running(engine, sidecar, tmp_path, "--user", "1000730000:0", "--volume", "other:/var/lib/flipwatch")
    try:
        container.wait_until_alive()
    finally:
        container.remove()


def test_runs_with_the_files_of_the_compose_file(engine: Engine, sidecar: str, tmp_path: Path) -> None:
    """Environment, settings and secrets of deploy/compose.yaml: uid 65532 can read them all, and the tokens count."""
    compose = tmp_path / "deploy" / "compose"
    shutil.copytree(ROOT / "deploy" / "compose", compose, ignore=shutil.ignore_patterns("secrets"))
    subprocess.run(["bash", str(compose / "make_secrets.sh")], check=True, capture_output=True)
    secrets = compose / "secrets"
    service = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["flipwatch"]
    extra = ["--volume", "composed:/var/lib/flipwatch"]
    for name, value in service["environment"].items():
        extra += ["--env", f"{name}={value}"]
    for secret in set(service["secrets"]) - {"probe_token"}:
        extra += ["--volume", f"{secrets / secret}:/run/secrets/{secret}:ro"]
    for bind in (volume for volume in service["volumes"] if isinstance(volume, dict)):
        extra += ["--volume", f"{(ROOT / 'deploy' / bind['source']).resolve()}:{bind['target']}:ro"]
    container = Running(engine, sidecar, secrets, *extra)
    try:
        container.wait_until_alive()
        status, text = get(f"{container.url}/v1/info", (secrets / "operator_token").read_text().strip())
        assert status == 200
        settings = json.loads(text)["settings"]
        assert settings["mitigation"]["mode"] == "observe"
        assert settings["vllm"]["url"] == "http://vllm:8000"
        assert get(f"{container.url}/v1/info", "no such token")[0] == 401
        status, text = get(f"{container.url}/v1/faults", (secrets / "alertmanager_token").read_text().strip())
        assert status == 403
        assert "does not have the scope admin" in text
    finally:
        container.remove()


def test_ends_soon_after_sigterm(engine: Engine, sidecar: str, tmp_path: Path) -> None:
    """SIGTERM ends it in order, well within the 10 seconds that engines wait."""
    container = Running(engine, sidecar, tmp_path, "--volume", "ending:/var/lib/flipwatch")
    try:
        container.wait_until_alive()
        start = time.monotonic()
        container.send("TERM")
        assert container.exit_code() == 0
        took = time.monotonic() - start
        print(f"\nended {took:.1f} s after SIGTERM")
        assert took < 10
    finally:
        container.remove()


def test_is_small(engine: Engine, sidecar: str, python_base: str) -> None:
    """Under 65 MB on top of the base, and under 200 MB with the stand-in; the true base has another size."""
    whole, base = engine.size(sidecar), engine.size(python_base)
    print(f"\n{whole / MB:.0f} MB, {(whole - base) / MB:.0f} MB of it on top of the stand-in base")
    assert whole - base < 65 * MB
    assert whole < 200 * MB


def test_says_what_it_is(engine: Engine, sidecar: str, python_base: str) -> None:
    """Labels, user, port, stop signal, entry point."""
    config = engine.config(sidecar)["config"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert labels["title"] == "Flipwatch"
    assert labels["licenses"] == "Apache-2.0"
    assert labels["version"] == re.search(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    ).group(1)
    assert labels["revision"] == "0123abc"
    assert labels["base.name"] == python_base
    assert config["User"] == "65532:65532"
    assert config["ExposedPorts"] == {"9477/tcp": {}}
    assert config["StopSignal"] == "SIGTERM"
    assert (config["Entrypoint"], config["Cmd"]) == (["flipwatch"], ["serve"])


def test_tells_nothing_about_the_machine_that_built_it(engine: Engine, sidecar: str, wheels: Path) -> None:
    """Configuration and history name no token, no setting of pip, and no place where pip of this machine looks."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    settings += " ".join(
        value for name, value in os.environ.items() if re.match(r"PIP_|.*_PROXY$", name, re.IGNORECASE)
    )
    words = re.findall(r"[^\s'\"=]*/[^\s'\"]+", settings)
    places = {urlsplit(word).hostname or urlsplit(word).path for word in words} | {str(wheels), "/mirror", "pip.conf"}
    text = engine.buildah("inspect", "--type", "image", sidecar)
    print(f"\n{len(places)} places looked for")
    assert not [place for place in places if place in text]
    assert not [
        name for name in engine.config(sidecar)["config"]["Env"] if re.search(r"TOKEN|PASSWORD|PROXY|PIP_", name)
    ]


def test_sbom_lists_what_is_pinned(engine: Engine, sidecar: str, tmp_path: Path) -> None:
    """syft finds exactly the pinned packages and Flipwatch, at their versions, besides Debian's."""
    archive, sbom = tmp_path / "image.tar", tmp_path / "sbom.spdx.json"
    engine.buildah("push", "-q", sidecar, f"oci-archive:{archive}:test")
    syft = Path(sys.executable).with_name("syft")
    engine.call(str(syft), "-q", f"oci-archive:{archive}", "-o", f"spdx-json={sbom}")
    found = {}
    for package in json.loads(sbom.read_text())["packages"]:
        links = [reference["referenceLocator"] for reference in package.get("externalRefs", [])]
        if any(link.startswith("pkg:pypi/") for link in links):
            found[re.sub(r"[-_.]+", "-", package["name"]).lower()] = package["versionInfo"]
    assert found == pinned() | {"flipwatch": "0.1.0"}
