"""Lint of the Dockerfile, and what of the repository goes into a build."""

import subprocess
import sys
from pathlib import Path

from .engine import HERE, ROOT, Engine


def test_hadolint_has_nothing_to_say() -> None:
    """hadolint passes both Dockerfiles at its strictest level."""
    hadolint = Path(sys.executable).with_name("hadolint")
    files = [str(ROOT / "Dockerfile"), str(HERE / "vllm_stand_in.Dockerfile")]
    done = subprocess.run([str(hadolint), "--failure-threshold", "style", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_context_is_code_and_nothing_else(engine: Engine, tmp_path: Path) -> None:
    """A COPY of all gets what .dockerignore lets through: no environment, no history, no secret, no test."""
    everything = tmp_path / "Dockerfile"
    everything.write_text("FROM scratch\nCOPY . /\n")
    engine.buildah("bud", "-t", "localhost/context:test", "-f", str(everything), str(ROOT))
    container = engine.buildah("from", "--pull=never", "localhost/context:test")
    try:
        folder = Path(engine.buildah("mount", container))
        assert {path.name for path in folder.iterdir()} == {
            "LICENSE", "README.md", "pyproject.toml", "requirements", "src", "monitors", "probe", "service",
        }  # fmt: skip
        assert [path.name for path in (folder / "requirements").iterdir()] == ["sidecar.txt"]
        assert not list(folder.rglob("__pycache__"))
        assert (folder / "src" / "flipwatch" / "service").is_symlink()
    finally:
        engine.buildah("rm", container)
