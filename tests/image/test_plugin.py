"""The target `plugin` on stand-ins for vLLM's image, which have its metadata and dependencies, and no vLLM."""

from pathlib import Path

import pytest

from .engine import Engine, default_of, make_vllm_base, pinned

_LOAD = """
from importlib.metadata import entry_points, version
for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
    [point] = entry_points(group=group)
    print(group, point.name, point.value)
entry_points(group="vllm.general_plugins")["flipwatch"].load()()
print(version("cryptography"))
"""


@pytest.mark.parametrize("packages", ["fastapi pydantic cryptography", "fastapi pydantic"])
def test_adds_the_probe_and_one_variable(engine: Engine, python_base: str, wheels: Path, packages: str) -> None:
    """User, entry point and all else of vLLM's image stay; cryptography comes where it is missing."""
    name = f"docker.io/vllm/stand-in:{len(packages)}"
    base = make_vllm_base(engine, python_base, wheels, name, packages)
    seconds = engine.build(wheels, "plugin", "localhost/plugin:test", "--build-arg", f"VLLM_IMAGE={base}")
    print(f"\nplugin built in {seconds:.0f} s on a stand-in with {packages}")

    before, after = engine.config(base), engine.config("localhost/plugin:test")
    assert after["config"]["Entrypoint"] == before["config"]["Entrypoint"] == ["vllm", "serve"]
    assert after["config"].get("User", "") == before["config"].get("User", "")
    assert set(after["config"]["Env"]) - set(before["config"]["Env"]) == {"VLLM_PLUGINS=flipwatch"}
    assert set(before["config"]["Env"]) <= set(after["config"]["Env"])
    assert after["rootfs"]["diff_ids"][:-2] == before["rootfs"]["diff_ids"]
    added = engine.size("localhost/plugin:test") - engine.size(base)
    print(f"{added / 1e6:.1f} MB more")
    assert added < 5e6 or "cryptography" not in packages
    assert after["config"]["Labels"]["org.opencontainers.image.base.name"] == base

    container = engine.buildah("from", "--pull=never", "localhost/plugin:test")
    try:
        said = engine.buildah("run", container, "--", "python3", "-c", _LOAD).splitlines()
    finally:
        engine.buildah("rm", container)
    assert said == [
        "vllm.general_plugins flipwatch flipwatch.probe.plugin:register",
        "vllm.endpoint_plugins flipwatch flipwatch.probe.endpoint:ProbeEndpoint",
        pinned()["cryptography"],
    ]


def test_does_not_build_on_something_else(engine: Engine, python_base: str, vllm_base: str, wheels: Path) -> None:
    """An image without vLLM is refused while it is built, not when it is to serve."""
    assert vllm_base == default_of("VLLM_IMAGE")
    with pytest.raises(AssertionError, match=r"No module named pip|No package metadata was found for vllm"):
        engine.build(wheels, "plugin", "localhost/none:test", "--build-arg", f"VLLM_IMAGE={python_base}")
