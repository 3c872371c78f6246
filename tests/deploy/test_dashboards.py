"""The boards keep dashboard-linter's rules and ours: no made-up address, and what is not known never looks healthy."""

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from flipwatch.monitors.alpha_scan import QUICK_GRID

from .dashboards import JSON, MAY_BE_EMPTY, ROOT, VALUES, Query, boards, panels, queries
from .promql import Selector, selectors

PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
GOLDEN = (ROOT / "tests" / "service" / "golden" / "metrics.txt").read_text(encoding="utf-8")
RULES = ROOT / "helm" / "flipwatch" / "files" / "rules.yaml"

# What each variable becomes here, so that a query shows which one stands where.
RATE, RANGE = "7m", "11h"
SIGNS = {"job": "JOB", "instance": "INSTANCE", "model_name": "MODEL", "vllm_instance": "VLLM"}
SIGNS |= {"__rate_interval": RATE, "__range": RANGE, "__interval": "13s"}

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
ROWS = ("Overview", "Blocks", "Integrity", "Answers", "Mitigation", "Cost")
# Names that Grafana has for units.
UNITS = {"none", "s", "percentunit", "dateTimeFromNow"}

# Of vLLM: its own source is asked for the names.  Of dcgm-exporter: the field's name in NVIDIA's DCGM.
VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:kv_cache_usage_perc",
}
DCGM = {"DCGM_FI_DEV_XID_ERRORS"}
PROMETHEUS = {"up", "ALERTS"}

NOT_BY_SERVER = {
    **dict.fromkeys(VLLM, "vLLM is another target with a job and instance of its own: by model and $vllm_instance"),
    **dict.fromkeys(DCGM, "dcgm-exporter is another target: joined by pod or host, or shown for all GPUs"),
}
"""Metric -> why its selectors have neither $job nor $instance."""

ABOUT_ALL_SERVERS = {
    ("flipwatch-fleet", "Alerts of Prometheus"): "an alert about all servers has no label job or instance",
    ("flipwatch-server", "job"): "finds the jobs",
    ("flipwatch-fleet", "job"): "finds the jobs",
    ("flipwatch-server", "instance"): "finds the servers of the jobs",
    ("flipwatch-fleet", "instance"): "finds the servers of the jobs",
}
"""(board, title) of queries that do not go by $job and $instance -> why."""

NOT_SHOWN = {
    "flipwatch_drift_t": "drift itself is shown with its threshold; t is in the finding",
    "flipwatch_skip_gain_threshold_nats": "a setting; its t is shown as a line",
    "flipwatch_weights_parity_bytes": "a cost in memory that stays as it is; docs/metrics.md",
    "flipwatch_weights_chunks": "a size that stays as it is; bytes covered are shown",
}
"""Exported family that is on no board -> why."""


def _families() -> dict[str, frozenset[str]]:
    """Exported metric -> labels, from the golden file; counters with _total."""
    found: dict[str, frozenset[str]] = {}
    for name, labels in re.findall(r"^(flipwatch_\w+)(?:\{(.*)\})? ", GOLDEN, flags=re.MULTILINE):
        found[name] = found.get(name, frozenset()) | frozenset(re.findall(r'(\w+)="', labels))
    return found


def _recorded() -> set[str]:
    """Metrics that the recording rules make."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}


def _selected() -> Iterator[tuple[Query, Selector]]:
    for query in queries(SIGNS):
        for selector in selectors(query.expr):
            yield query, selector


def _values(tree: object, key: str) -> Iterator[object]:
    """All values of a key anywhere in a board."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from _values(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from _values(value, key)


@pytest.fixture(params=["flipwatch-server", "flipwatch-fleet"])
def board(request: pytest.FixtureRequest) -> JSON:
    """Each board in turn."""
    return boards()[request.param]


def test_the_files_are_as_the_program_makes_them() -> None:
    """Who changes a board changes deploy/grafana and runs write.py."""
    program = str(ROOT / "deploy" / "grafana" / "write.py")
    done = subprocess.run([sys.executable, program, "--check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert set(boards()) == {"flipwatch-server", "flipwatch-fleet"}


def test_no_data_source_is_named(board: JSON) -> None:
    """Everything reads the data source of the variable, whose value is empty."""
    assert list(_values(board, "datasource"))
    assert all(source == DATASOURCE for source in _values(board, "datasource"))
    (variable,) = (one for one in board["templating"]["list"] if one["type"] == "datasource")
    assert (variable["name"], variable["query"], variable["current"]) == ("datasource", "prometheus", {})


def test_the_frame(board: JSON) -> None:
    """Stable uid, tags, schema, not editable, shared cross-hair, links that keep variables and time."""
    assert board["tags"] == ["flipwatch"]
    assert board["schemaVersion"] >= 39
    assert board["editable"] is False
    assert board["title"]
    assert board["description"]
    assert "id" not in board
    links = {tuple(link["tags"]): link for link in board["links"]}
    assert set(links) == {("flipwatch",), ("vllm",), ("dcgm",)}
    assert all(link["type"] == "dashboards" and link["keepTime"] and not link["url"] for link in links.values())
    # Jobs and instances of dcgm-exporter are others.
    assert [tags for tags, link in links.items() if not link["includeVars"]] == [("dcgm",)]
    assert not re.findall(r"https?://\S+", str(board))


def test_variables(board: JSON) -> None:
    """Job, server and model can be chosen, several at a time, all at first; they follow the time range."""
    variables = {one["name"]: one for one in board["templating"]["list"]}
    for name, all_value in (("job", ".+"), ("instance", ".+"), ("model_name", ".*")):
        one = variables[name]
        assert (one["multi"], one["includeAll"], one["allValue"], one["refresh"]) == (True, True, all_value, 2)
        assert one["label"]
    assert all(one["refresh"] == 2 for one in variables.values() if one["type"] == "query")
    used = {
        name for query in queries() if query.board == board["uid"] for name in re.findall(r"\$([a-z_]+)", query.raw)
    }
    assert used - {"__rate_interval", "__range", "__interval"} == set(variables) - {"datasource"}


def test_choices_are_those_of_the_metric() -> None:
    """The scores and references that can be chosen are labels of flipwatch_block_zscore."""
    for board in boards().values():
        variables = {one["name"]: one for one in board["templating"]["list"]}
        for name in ("score", "reference"):
            values = [option["value"] for option in variables[name]["options"]]
            assert ",".join(values) == variables[name]["query"]
            assert values[0] == VALUES[name] == variables[name]["current"]["value"]
        assert set(variables["score"]["query"].split(",")) == set(
            re.findall(r'flipwatch_threshold\{score="(\w+)"', GOLDEN)
        )
        assert set(variables["reference"]["query"].split(",")) == set(
            re.findall(r'flipwatch_block_zscore\{.*reference="(\w+)"', GOLDEN)
        )


def test_panels_say_what_they_show(board: JSON) -> None:
    """A title of its own, a description in sentences, a known unit, at least one query."""
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)
    for panel in panels(board):
        assert panel["title"]
        assert len(panel["description"]) > 40, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        assert set(_values(panel, "unit")) <= UNITS, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_rows_and_places(board: JSON) -> None:
    """Rows in the order in which one looks; panels fill the width without overlap."""
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert len(rows) == len(ROWS)
    assert all(title.startswith(start) for title, start in zip(rows, ROWS, strict=True))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        assert at["w"] >= 4 or panel["type"] == "row"
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_what_is_not_known_never_looks_healthy(board: JSON) -> None:
    """No green below a threshold, grey for null, words for nothing, no value from the past, no line over a gap."""
    for panel in panels(board):
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["noValue"] == "no data", panel["title"]
        steps = [step["color"] for each in _values(panel, "thresholds") for step in each["steps"]]
        assert not [color for color in steps if "green" in color] or panel["title"] == "Servers by verdict"
        for mappings in _values(panel, "mappings"):
            assert isinstance(mappings, list)
            if mappings:
                absent = mappings[-1]["options"]["result"]
                assert mappings[-1]["options"]["match"] == "null+nan"
                assert (absent["text"], absent["color"]) == ("no data", "#7a7a7a")
        if panel["type"] in ("stat", "table"):
            assert all(target["instant"] and not target["range"] for target in panel["targets"]), panel["title"]
        else:
            assert defaults["custom"].get("spanNulls", False) is False
            assert all(target["range"] and not target["instant"] for target in panel["targets"]), panel["title"]
        if panel["type"] == "state-timeline":
            assert defaults["mappings"], panel["title"]


def test_green_is_what_is_known_to_be_good() -> None:
    """The words that are green, on both boards; none of them is about something absent or switched off."""
    green = {
        option["text"]
        for board in boards().values()
        for options in _values(board, "options")
        if isinstance(options, dict)
        for option in options.values()
        if isinstance(option, dict) and "green" in str(option.get("color"))
    }
    assert green == {"ok", "moving", "no symptom", "verified", "yes"}


def test_queries_go_by_server_and_model() -> None:
    """Every selector has $job, $instance, and $model_name where the metric has the label; exceptions have reasons."""
    families = _families()
    needed = set()
    for query, (metric, matchers, _, _) in _selected():
        where = f"{query.board}: {query.title}: {metric}"
        mine = {'job=~"JOB"', 'instance=~"INSTANCE"'} <= matchers
        if (query.board, query.title) in ABOUT_ALL_SERVERS:
            assert not mine, f"{where} needs no exception"
            needed.add((query.board, query.title))
        elif metric in NOT_BY_SERVER:
            needed.add(metric)
            if metric in VLLM and query.kind == "panel":
                assert matchers == {'model_name=~"MODEL"', 'instance=~"VLLM"'}, where
        else:
            assert mine, where
        if metric in families and query.kind != "variable":
            assert ('model_name=~"MODEL"' in matchers) == ("model_name" in families[metric]), where
    assert needed == set(ABOUT_ALL_SERVERS) | set(NOT_BY_SERVER)


def test_counters_and_ranges() -> None:
    """A counter is only seen through rate or increase, over $__rate_interval, or $__range for a sum of the board."""
    minutes, hours = timedelta(minutes=int(RATE[:-1])), timedelta(hours=int(RANGE[:-1]))
    allowed = {"rate": {minutes}, "changes": {minutes}, "increase": {minutes, hours}, "present_over_time": {hours}}
    for query, (metric, _, function, over) in _selected():
        where = f"{query.board}: {query.title}: {metric}"
        if metric.endswith("_total"):
            assert function in ("rate", "increase"), where
        elif function is not None:
            assert function not in ("rate", "irate", "increase"), where
        if function is not None:
            assert over in allowed[function], where


def test_every_metric_exists() -> None:
    """In the golden file of the metrics, in the recording rules, or in vLLM's, DCGM's or Prometheus' list."""
    exported = set(_families()) | _recorded()
    assert {selector.metric for _, selector in _selected()} <= exported | VLLM | DCGM | PROMETHEUS


def test_vllm_has_these_metrics() -> None:
    """The installed vLLM's source names them; its counters get their _total from prometheus-client."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text(encoding="utf-8")
    assert not [name for name in VLLM if f'name="{name.removesuffix("_total")}"' not in source]


def test_every_exported_family_is_shown() -> None:
    """Or there is a reason why not."""
    used = {selector.metric for _, selector in _selected()}
    assert set(_families()) - used == set(NOT_SHOWN)


def test_columns_of_the_losses() -> None:
    """One column for each alpha that the metric can have, in their order."""
    (panel,) = (one for one in panels(boards()["flipwatch-server"]) if one["title"].startswith("Loss by alpha"))
    columns = panel["transformations"][1]["options"]["indexByName"]
    assert list(columns) == ["row\\alpha", *(f"{alpha:g}" for alpha in QUICK_GRID)]
    assert set(re.findall(r'flipwatch_block_loss_nats\{alpha="([\d.]+)"', GOLDEN)) <= set(columns)


def test_exceptions_are_about_something() -> None:
    """Every (board, title) that may be empty exists."""
    there = {(query.board, query.title) for query in queries()}
    titles = {title for _, title in there}
    for board, title in MAY_BE_EMPTY:
        assert (board, title) in there or (board == "*" and title in titles), title


def test_the_fleet_leads_to_the_server() -> None:
    """A click on a server opens its board with the same data source, job, model and time."""
    links = [
        link for link in _values(boards()["flipwatch-fleet"], "links") for link in link or () if "tags" not in link
    ]
    links += [
        link
        for override in _values(boards()["flipwatch-fleet"], "properties")
        for one in override
        if one["id"] == "links"
        for link in one["value"]
    ]
    assert links
    for link in links:
        assert link["url"].startswith("/d/flipwatch-server?${datasource:queryparam}&${job:queryparam}&")
        assert link["url"].endswith("&${__url_time_range}")
        assert re.search(r"&var-instance=\$\{__(field\.labels|data\.fields)\.instance\}&", link["url"])


def test_grafana_is_told_where_things_are() -> None:
    """One data source at the compose file's Prometheus, and the folder where the compose file puts the boards."""
    sources = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text(encoding="utf-8"))
    (source,) = sources["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    providers = yaml.safe_load((PROVISIONING / "dashboards" / "flipwatch.yaml").read_text(encoding="utf-8"))
    (provider,) = providers["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards/flipwatch"
