"""buildah and podman as these tests use them, and what they build on."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def pinned() -> dict[str, str]:
    """Normalised name -> version, as requirements/sidecar.txt has them."""
    lines = (ROOT / "requirements" / "sidecar.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def default_of(argument: str) -> str:
    """The default of an ARG of the Dockerfile: the name that its FROM asks for."""
    found = re.search(rf"^ARG {argument}=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None, argument
    return found.group(1)


def _can_overlay(folder: Path) -> bool:
    """Whether layers can lie on each other here; else each one is a copy, which takes minutes."""
    lower, upper, work, merged = (folder / name for name in ("lower", "upper", "work", "merged"))
    for place in (lower, upper, work, merged):
        place.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    if subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], capture_output=True
    ).returncode:
        return False
    subprocess.run(["umount", str(merged)], check=True)
    return True


class Engine:
    """buildah and podman on a storage folder of their own."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        conf = storage / "storage.conf"
        driver = "overlay" if _can_overlay(storage) else "vfs"
        conf.write_text(f'[storage]\ndriver = "{driver}"\ngraphroot = "{storage}/images"\nrunroot = "{storage}/run"\n')
        self._environment = os.environ | {"CONTAINERS_STORAGE_CONF": str(conf), "BUILDAH_ISOLATION": "chroot"}

    def call(self, *command: str, timeout: float = 600, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program with this storage; output is text.  A failure is an error that shows it, unless not `ok`."""
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=timeout)
        assert not ok or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    def buildah(self, *arguments: str) -> str:
        """Standard output of buildah."""
        return self.call("buildah", *arguments).stdout.strip()

    def podman(self, *arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Podman with runc: crun wants rights that a container of a CI machine may lack."""
        return self.call("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs", *arguments, ok=ok)

    def build(self, wheels: Path, target: str, tag: str, *arguments: str) -> float:
        """Build a target of the Dockerfile as `tag` with pip looking at `wheels` only; the seconds that took."""
        pip = wheels / "pip.conf"
        pip.write_text("[global]\nno-index = true\nfind-links = /mirror\n")
        start = time.monotonic()
        self.buildah(
            "bud", "--pull=never", "--layers", "--format", "docker", "--target", target, "-t", tag,
            "--volume", f"{wheels}:/mirror:ro", "--volume", f"{pip}:/etc/pip.conf:ro", *arguments, str(ROOT),
        )  # fmt: skip
        return time.monotonic() - start

    def config(self, image: str) -> dict[str, Any]:
        """Configuration and history of an image, as Docker has them."""
        docker: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", image))["Docker"]
        return docker

    def size(self, image: str) -> int:
        """Bytes of the files of an image, without compression."""
        container = self.buildah("from", "--pull=never", image)
        try:
            folder = Path(self.buildah("mount", container))
            links: set[int] = set()
            total = 0
            for path in folder.rglob("*"):
                state = path.lstat()
                if state.st_ino not in links:
                    links.add(state.st_ino)
                    total += state.st_size if path.is_symlink() or path.is_file() else 0
            return total
        finally:
            self.buildah("rm", container)


def make_vllm_base(engine: Engine, python_base: str, wheels: Path, name: str, packages: str) -> str:
    """Build tests/image/vllm_stand_in.Dockerfile as `name`, with `packages` of the wheels."""
    engine.buildah(
        "bud", "--pull=never", "--format", "docker", "-t", name, "-f", str(HERE / "vllm_stand_in.Dockerfile"),
        "--build-arg", f"BASE={python_base}", "--build-arg", f"PACKAGES={packages}",
        "--volume", f"{wheels}:/mirror:ro", str(HERE),
    )  # fmt: skip
    return name
