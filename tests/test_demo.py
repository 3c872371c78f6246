"""`make demo` and `make up` where nothing can be started: one line that says what to do, and code 2."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The programs in a tree of their own, which has no model."""
    shutil.copytree(ROOT / "deploy" / "demo", tmp_path / "deploy" / "demo", ignore=shutil.ignore_patterns(".*", "__*"))
    return tmp_path


def _refused(tree: Path, program: str, *arguments: str) -> str:
    """Run one; what it says."""
    done = subprocess.run(
        [sys.executable, str(tree / "deploy" / "demo" / program), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tree / ".cache").exists()
    return done.stderr


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("program", [("demo.py",), ("up.py", "start")])
def test_without_a_model(tree: Path, program: tuple[str, ...], folder: bool) -> None:
    """No folder, or a folder without config.json."""
    if folder:
        (tree / ".venv" / "model").mkdir(parents=True)
    said = _refused(tree, *program)
    assert f"no model in {tree / '.venv' / 'model'}" in said
    assert "make setup" in said


@pytest.mark.parametrize("option", ["--vllm-port", "--port"])
def test_with_a_taken_port(tree: Path, option: str) -> None:
    """The port of either server, before vLLM takes its time to start."""
    (tree / ".venv" / "model").mkdir(parents=True)
    (tree / ".venv" / "model" / "config.json").write_text("{}")
    with socket.socket() as listener, socket.socket() as other:
        for each in (listener, other):
            each.bind(("127.0.0.1", 0))
        listener.listen()
        taken, free = str(listener.getsockname()[1]), str(other.getsockname()[1])
        rest = "--port" if option == "--vllm-port" else "--vllm-port"
        said = _refused(tree, "up.py", "start", option, taken, rest, free)
    assert f"Port {taken} on 127.0.0.1 is taken" in said
