"""The Grafana boards, and every query in them with its variables filled in."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "helm" / "flipwatch" / "files" / "dashboards"

JSON = dict[str, Any]

VALUES = {
    "job": ".+",
    "instance": ".+",
    "model_name": ".*",
    "vllm_instance": ".+",
    "score": "skip_gain",
    "reference": "blocks",
    "__rate_interval": "1m",
    "__interval": "15s",
    "__range": "1h",
}
"""What Grafana puts in for a variable while everything is chosen."""

MAY_BE_EMPTY = {
    ("*", "Mitigation on"): "a mark only when one begins",
    ("*", "Mitigation off"): "a mark only when one ends",
    ("*", "vLLM restarted"): "a mark only when it restarts",
    ("flipwatch-fleet", "Alerts of Prometheus"): "rows only while an alert of Prometheus fires",
    ("flipwatch-fleet", "Xid errors of the GPUs under these servers"): "needs dcgm-exporter and Kubernetes",
    ("flipwatch-fleet", "Xid errors of the hosts of these servers"): "needs dcgm-exporter",
    ("flipwatch-fleet", "Xid errors of all GPUs"): "needs dcgm-exporter",
}
"""(board, title) of queries that rightly have no data on a server in the state that fills all others -> why."""


class Query(NamedTuple):
    """One query of a board."""

    board: str
    """Its uid."""
    kind: str
    """`panel`, `variable` or `annotation`."""
    title: str
    """Of the panel, or the name of the variable or annotation."""
    raw: str
    """As it stands in the board; of a variable what is inside of `label_values(..., label)`."""
    expr: str
    """With all variables filled in."""
    datasource: JSON
    target: JSON
    """The JSON that it stands in."""


def boards() -> dict[str, JSON]:
    """uid -> board."""
    read = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    return {board["uid"]: board for board in read}


def panels(board: JSON) -> list[JSON]:
    """The panels of a board but for the titles of its rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def filled(raw: str, values: Mapping[str, str] = VALUES) -> str:
    """A query with its variables filled in; one that is not in `values` is a `KeyError`.  $1 of a regex stays."""
    return re.sub(r"\$([a-z_]+)", lambda found: values[found[1]], raw)


def queries(values: Mapping[str, str] | None = None) -> Iterator[Query]:
    """Every query of every board; `values`: variables with other values than those of `VALUES`."""
    chosen = {**VALUES, **(values or {})}
    for uid, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield _query(uid, "panel", panel["title"], target["expr"], target, chosen)
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])
                assert found is not None, f"The variable {variable['name']} is not label_values(series, label)."
                yield _query(uid, "variable", variable["name"], found[1], variable, chosen)
        for annotation in board["annotations"]["list"]:
            yield _query(uid, "annotation", annotation["name"], annotation["expr"], annotation, chosen)


def may_be_empty(query: Query) -> bool:
    """Whether no data is right for it."""
    return (query.board, query.title) in MAY_BE_EMPTY or ("*", query.title) in MAY_BE_EMPTY


def _query(uid: str, kind: str, title: str, raw: str, target: JSON, values: Mapping[str, str]) -> Query:
    return Query(uid, kind, title, raw, filled(raw, values), target["datasource"], target)
