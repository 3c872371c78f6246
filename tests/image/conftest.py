"""The real Dockerfile, built on stand-ins for its bases, since no registry is asked for the true ones.

Packages come from a folder of wheels that pip of the host has fetched: how this machine reaches an index is no part of
any image.  Storage is a folder of this test run; nothing of it is left behind but the cache (`FLIPWATCH_CACHE`).
"""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .engine import ROOT, Engine, default_of, make_vllm_base

CACHE = Path(os.environ.get("FLIPWATCH_CACHE", Path.home() / ".cache" / "flipwatch")) / "image"

# As Debian's slim images do it: no documentation, and /usr merged by hand, not by a program that brings all of Perl.
_SLIM = ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*"]
_PACKAGES = "usr-is-merged,python3,python3-venv,ca-certificates,tzdata"
_MERGED = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Storage in the folder of this run, which `tests/image/run` removes with the mounts that lie on it."""
    return Engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def wheels() -> Path:
    """What sidecar.txt and the build need, fetched by pip of the host as it is set up here, and kept."""
    build = re.findall(r"setuptools==\S+", (ROOT / "Dockerfile").read_text())
    wanted = (ROOT / "requirements" / "sidecar.txt").read_text() + "".join(build)
    folder = CACHE / f"wheels-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        where = ["--no-deps", "--only-binary", ":all:", "-d", str(folder)]
        what = ["-r", str(ROOT / "requirements" / "sidecar.txt"), *build]
        subprocess.run([*pip, *where, *what], check=True)
        (folder / "complete").touch()
    return folder


@pytest.fixture(scope="session")
def python_base(engine: Engine) -> str:
    """A stand-in for the Python image: Debian 12 with its own Python 3.11, slimmed as Debian's slim images are."""
    archive = CACHE / f"debian-{hashlib.sha256(f'{_PACKAGES}{_SLIM}'.encode()).hexdigest()[:12]}.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        part = archive.with_suffix(".part.tar")
        slim = [f"--dpkgopt=path-exclude={pattern}" for pattern in _SLIM]
        engine.call(
            "mmdebstrap", "--variant=essential", _MERGED, f"--include={_PACKAGES}", *slim, "bookworm", str(part)
        )
        part.rename(archive)
    container = engine.buildah("from", "scratch")
    engine.buildah("add", "-q", container, str(archive), "/")
    engine.buildah("config", "--env", "PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin", container)
    name = default_of("PYTHON_IMAGE")
    engine.buildah("commit", "-q", "--rm", container, name)
    return name


@pytest.fixture(scope="session")
def vllm_base(engine: Engine, python_base: str, wheels: Path) -> str:
    """A stand-in for vLLM's image: an environment with pip, what vLLM depends on, and metadata that says it is vLLM."""
    return make_vllm_base(engine, python_base, wheels, default_of("VLLM_IMAGE"), "fastapi pydantic cryptography")


@pytest.fixture(scope="session")
def sidecar(engine: Engine, python_base: str, vllm_base: str, wheels: Path) -> str:
    """The sidecar's image, from the unchanged Dockerfile."""
    seconds = engine.build(wheels, "sidecar", "localhost/flipwatch:test", "--build-arg", "REVISION=0123abc")
    print(f"\nsidecar built in {seconds:.0f} s on a stand-in for {python_base}")
    return "localhost/flipwatch:test"
