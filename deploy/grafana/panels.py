"""Panels of a board as Grafana's JSON.  All read the data source of the variable; numbers of now come from instant
queries, so that a value which has vanished is not shown as if it were there."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from states import ABSENT, NOT_KNOWN

JSON = dict[str, Any]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
PLAIN = ((None, "text"),)
"""Thresholds of a number that is neither good nor bad by itself."""
BAD_ABOVE_ZERO = ((None, "text"), (1, "red"))
OVER_LIMIT = ((None, "dark-blue"), (0.5, "yellow"), (1.0, "orange"))
"""Of a ratio to its limit.  What lies below it is no proof of health, so it is not green."""

LATE = ((None, "dark-blue"), (1.5, "yellow"), (3, "orange"))
"""Of an age to the time between two runs."""


class Query(NamedTuple):
    """A query and how its series are named."""

    expr: str
    legend: str


class Column(NamedTuple):
    """One column of a table."""

    expr: str
    title: str
    unit: str = "none"
    decimals: int | None = None
    mappings: Sequence[JSON] = ()
    thresholds: Sequence[tuple[float | None, str]] = PLAIN
    shown: bool = True
    """False: only its labels are wanted."""


def _steps(thresholds: Sequence[tuple[float | None, str]]) -> JSON:
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in thresholds]}


def _targets(queries: Sequence[Query], *, instant: bool, table: bool = False) -> list[JSON]:
    return [
        {
            "refId": chr(ord("A") + at),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "format": "table" if table else "time_series",
            "instant": instant,
            "range": not instant,
            "legendFormat": query.legend,
        }
        for at, query in enumerate(queries)
    ]


def _panel(kind: str, title: str, text: str, size: tuple[int, int], targets: list[JSON], defaults: JSON) -> JSON:
    width, height = size
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height, "x": 0, "y": 0},
        "targets": targets,
        "fieldConfig": {"defaults": {"noValue": "no data", **defaults}, "overrides": []},
        "options": {},
    }


def stat(
    title: str,
    text: str,
    size: tuple[int, int],
    queries: Sequence[Query],
    *,
    unit: str = "none",
    decimals: int | None = None,
    mappings: Sequence[JSON] = (ABSENT,),
    thresholds: Sequence[tuple[float | None, str]] = PLAIN,
    colors: Mapping[str, str] | None = None,
) -> JSON:
    """Numbers or words of now.  `colors`: series -> its colour from 1 on."""
    defaults = _coloured(unit, decimals, mappings, thresholds)
    made = _panel("stat", title, text, size, _targets(queries, instant=True), defaults)
    made["fieldConfig"]["overrides"] = [
        _override(name, {"thresholds": _steps(((None, "text"), (1, color)))}) for name, color in (colors or {}).items()
    ]
    made["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "background" if len(mappings) > 1 else "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "value_and_name",
        "wideLayout": True,
        "percentChangeColorMode": "standard",
        "showPercentChange": False,
    }
    return made


def graph(
    title: str,
    text: str,
    size: tuple[int, int],
    queries: Sequence[Query],
    *,
    unit: str = "none",
    stacked: bool = False,
    bars: bool = False,
    dashed: Sequence[str] = (),
) -> JSON:
    """Lines or bars over time; no line goes over a gap.  `dashed`: names of limits."""
    custom: JSON = {
        "drawStyle": "bars" if bars else "line",
        "lineInterpolation": "stepAfter",
        "lineWidth": 1,
        "fillOpacity": 30 if stacked or bars else 0,
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "axisPlacement": "auto",
    }
    defaults = {"unit": unit, "color": {"mode": "palette-classic"}, "custom": custom, "mappings": []}
    made = _panel("timeseries", title, text, size, _targets(queries, instant=False), defaults)
    made["fieldConfig"]["overrides"] = [
        _override(
            name,
            {"custom.lineStyle": {"fill": "dash", "dash": [8, 8]}, "color": {"mode": "fixed", "fixedColor": "red"}},
            by="byRegexp",
        )
        for name in dashed
    ]
    made["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return made


def timeline(
    title: str,
    text: str,
    size: tuple[int, int],
    queries: Sequence[Query],
    *,
    unit: str = "none",
    decimals: int | None = None,
    mappings: Sequence[JSON] = (ABSENT,),
    thresholds: Sequence[tuple[float | None, str]] = ((None, NOT_KNOWN),),
    links: Sequence[JSON] = (),
    values: bool = True,
) -> JSON:
    """Rows of colours over time; a gap stays empty.  A number without a mapping has the colour of `thresholds`."""
    defaults = _coloured(
        unit,
        decimals,
        mappings,
        thresholds,
        # By default it connects nothing over a gap.
        custom={"fillOpacity": 80, "lineWidth": 0},
        links=list(links),
    )
    made = _panel("state-timeline", title, text, size, _targets(queries, instant=False), defaults)
    made["options"] = {
        "mergeValues": True,
        "showValue": "auto" if values else "never",
        "alignValue": "left",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return made


def table(
    title: str,
    text: str,
    size: tuple[int, int],
    columns: Sequence[Column],
    *,
    labels: Sequence[str],
    hidden: Sequence[str] = (),
    sort: str,
    descending: bool = True,
    links: Mapping[str, Sequence[JSON]] | None = None,
) -> JSON:
    """Rows of now, one for each set of `labels`, which come first; what a row lacks says so.

    `hidden`: labels that the queries have, and that are not shown.  `links`: column -> links of its cells.
    """
    values = [f"Value #{chr(ord('A') + at)}" for at in range(len(columns))] if len(columns) > 1 else ["Value"]
    shown = [(value, column) for value, column in zip(values, columns, strict=True) if column.shown]
    queries = [Query(column.expr, "") for column in columns]
    defaults = {
        "unit": "none",
        "mappings": [ABSENT],
        "color": {"mode": "thresholds"},
        "thresholds": _steps(PLAIN),
        "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False, "filterable": True},
    }
    made = _panel("table", title, text, size, _targets(queries, instant=True, table=True), defaults)
    made["transformations"] = [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(
                    ["Time", *hidden, *(value for value in values if value not in dict(shown))], True
                ),
                "indexByName": {name: at for at, name in enumerate([*labels, *(value for value, _ in shown)])},
                "renameByName": {value: column.title for value, column in shown},
            },
        },
    ]
    made["fieldConfig"]["overrides"] = [
        *(_override(column.title, _cells(column)) for _, column in shown),
        *(_override(name, {"links": list(to)}) for name, to in (links or {}).items()),
    ]
    made["options"] = _sorted_by(sort, descending=descending)
    return made


def matrix(
    title: str, text: str, size: tuple[int, int], expr: str, *, rows: str, columns: str, values: Sequence[str]
) -> JSON:
    """A table of now with a row for each value of the label `row` and a column for each of `values` of another label.

    `rows`: what stands over the first column.
    """
    # As the transformation names the first column.
    first = f"row\\{columns}"
    defaults = {
        "unit": "none",
        "decimals": 3,
        "mappings": [ABSENT],
        "color": {"mode": "continuous-BlPu"},
        "custom": {
            "align": "auto",
            "cellOptions": {"type": "color-background", "mode": "basic"},
            "inspect": False,
            "filterable": True,
        },
    }
    made = _panel("table", title, text, size, _targets([Query(expr, "")], instant=True, table=True), defaults)
    made["transformations"] = [
        {
            "id": "groupingToMatrix",
            "options": {"columnField": columns, "rowField": "row", "valueField": "Value", "emptyValue": "null"},
        },
        # Prometheus gives the series of an instant query in no order.
        {
            "id": "organize",
            "options": {
                "excludeByName": {},
                "indexByName": {name: at for at, name in enumerate([first, *values])},
                "renameByName": {first: rows, **{value: f"{columns} {value}" for value in values}},
            },
        },
    ]
    made["options"] = _sorted_by(rows, descending=False)
    return made


def _coloured(
    unit: str,
    decimals: int | None,
    mappings: Sequence[JSON],
    thresholds: Sequence[tuple[float | None, str]],
    **more: Any,
) -> JSON:
    """Defaults of fields whose colour comes from mappings and thresholds."""
    defaults: JSON = {
        "unit": unit,
        "mappings": list(mappings),
        "color": {"mode": "thresholds"},
        "thresholds": _steps(thresholds),
        **more,
    }
    return defaults if decimals is None else defaults | {"decimals": decimals}


def _sorted_by(title: str, *, descending: bool) -> JSON:
    """Options of a table."""
    return {
        "frameIndex": 0,
        "showHeader": True,
        "cellHeight": "sm",
        "sortBy": [{"displayName": title, "desc": descending}],
    }


def _cells(column: Column) -> JSON:
    colored = bool(column.mappings) or len(column.thresholds) > 1
    properties: JSON = {
        "unit": column.unit,
        "mappings": list(column.mappings) or [ABSENT],
        "thresholds": _steps(column.thresholds),
        "custom.cellOptions": {"type": "color-text" if colored else "auto"},
    }
    if column.decimals is not None:
        properties["decimals"] = column.decimals
    return properties


def _override(name: str, properties: Mapping[str, Any], by: str = "byName") -> JSON:
    return {
        "matcher": {"id": by, "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }
