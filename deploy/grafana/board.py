"""The frame of a board: variables, links, annotations, and the places of its panels."""

from collections.abc import Mapping, Sequence
from typing import Any

from panels import DATASOURCE
from promql import of

JSON = dict[str, Any]

SCORES = ("skip_gain", "bss", "slope", "largest_deviation")
REFERENCES = ("blocks", "profile")
_WIDTH = 24
_GATES = "(changes({metric}[$__rate_interval]) > 0) and {metric} == {value}"


def board(uid: str, title: str, text: str, rows: Mapping[str, Sequence[JSON]], more: Sequence[JSON] = ()) -> JSON:
    """A board with rows of panels; `more`: its own variables."""
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["flipwatch"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "links": [
            _boards("flipwatch", "Flipwatch", "The other board, with the same servers and time.", with_variables=True),
            _boards("vllm", "vLLM", "Boards with the tag vllm; give it to yours.", with_variables=True),
            # Its jobs and instances are those of another exporter.
            _boards("dcgm", "DCGM", "Boards with the tag dcgm; give it to yours.", with_variables=False),
        ],
        "annotations": {"list": _annotations()},
        "templating": {"list": [*_variables(), *more]},
        "panels": _placed(rows),
    }


def by_query(name: str, label: str, query: str, all_value: str) -> JSON:
    """A variable whose values are those of a label, several at a time, all at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "regex": "",
        # When the time range changes.
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": all_value,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        "hide": 0,
        "skipUrlSync": False,
    }


def by_choice(name: str, label: str, values: Sequence[str]) -> JSON:
    """A variable with one of `values`, the first of them at first."""
    return {
        "name": name,
        "label": label,
        "type": "custom",
        "query": ",".join(values),
        "multi": False,
        "includeAll": False,
        "current": {"selected": True, "text": values[0], "value": values[0]},
        "options": [{"selected": value == values[0], "text": value, "value": value} for value in values],
        "hide": 0,
        "skipUrlSync": False,
    }


def _variables() -> list[JSON]:
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "regex": "",
            "refresh": 1,
            "multi": False,
            "includeAll": False,
            "current": {},
            "options": [],
            "hide": 0,
            "skipUrlSync": False,
        },
        by_query("job", "Job", "label_values(flipwatch_up, job)", ".+"),
        by_query("instance", "Server", 'label_values(flipwatch_up{job=~"$job"}, instance)', ".+"),
        # .* also takes series without a name: of a model nobody has asked about yet.
        by_query(
            "model_name",
            "Model",
            'label_values(flipwatch_model_info{job=~"$job", instance=~"$instance"}, model_name)',
            ".*",
        ),
        by_choice("score", "Score of z", SCORES),
        by_choice("reference", "z against", REFERENCES),
    ]


def _boards(tag: str, title: str, text: str, *, with_variables: bool) -> JSON:
    return {
        "type": "dashboards",
        "tags": [tag],
        "title": title,
        "tooltip": text,
        "icon": "external link",
        "asDropdown": True,
        "includeVars": with_variables,
        "keepTime": True,
        "targetBlank": False,
        "url": "",
    }


def _annotations() -> list[JSON]:
    active = of("flipwatch_mitigation_active")
    restarts = of("flipwatch_vllm_restarts_seen_total")
    return [
        _annotation("Mitigation on", "blue", _GATES.format(metric=active, value=1), "block {{block}} is taken out"),
        _annotation("Mitigation off", "light-blue", _GATES.format(metric=active, value=0), "block {{block}} is back"),
        _annotation("vLLM restarted", "yellow", f"increase({restarts}[$__rate_interval]) > 0", "vLLM restarted"),
    ]


def _annotation(name: str, color: str, expr: str, text: str) -> JSON:
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expr,
        "titleFormat": name,
        "textFormat": f"{text} ({{{{instance}}}})",
        "tagKeys": "instance,block",
        "useValueForTime": False,
    }


def _placed(rows: Mapping[str, Sequence[JSON]]) -> list[JSON]:
    """All panels from left to right and from top to bottom, each row under its title."""
    placed: list[JSON] = []
    y = 0
    for title, panels in rows.items():
        head = {"type": "row", "title": title, "collapsed": False, "panels": []}
        placed.append(head | {"id": len(placed) + 1, "gridPos": {"w": _WIDTH, "h": 1, "x": 0, "y": y}})
        x, y, height = 0, y + 1, 0
        for panel in panels:
            at = panel["gridPos"]
            if x + at["w"] > _WIDTH:
                x, y, height = 0, y + height, 0
            placed.append(panel | {"id": len(placed) + 1, "gridPos": at | {"x": x, "y": y}})
            x, height = x + at["w"], max(height, at["h"])
        y += height
    return placed
