"""Objects for Prometheus and Grafana: off unless asked for, right for their operator, and the same as their sources."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1 as operator
from conftest import CHART, LEAST, SETS, merged, values_of
from engines import Four, documents, of_kind
from pydantic import ValidationError

RULES = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
BOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))

CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def rules_of(four: Four, **knobs: Any) -> dict[str, dict[str, Any]]:
    """Name -> alert, with these values under prometheusRule."""
    [made] = of_kind(
        four.render(CHART, merged(LEAST, {"prometheusRule": {"enabled": True, **knobs}})), "PrometheusRule"
    )
    return {rule["alert"]: rule for group in made["spec"]["groups"] for rule in group["rules"] if "alert" in rule}


def unknown_fields(model: Any, given: Any, place: str = "") -> list[str]:
    """Places of what was given and is no field of the operator's model: it drops what it does not know."""
    if isinstance(given, dict) and isinstance(model, dict):
        lost = [f"{place}.{key}" for key in given if key not in model]
        return lost + [
            found for key in given if key in model for found in unknown_fields(model[key], given[key], f"{place}.{key}")
        ]
    if isinstance(given, list) and isinstance(model, list):
        return [found for pair in zip(model, given, strict=True) for found in unknown_fields(*pair, f"{place}[]")]
    return []


def checked(document: dict[str, Any]) -> list[str]:
    """Fields that the operator does not know; `ValidationError` for wrong types."""
    model = getattr(operator, document["kind"]).model_validate(document)
    return unknown_fields(model.model_dump(mode="json", by_alias=True, exclude_unset=True), document)


def test_everything_is_off_by_default(four: Four) -> None:
    """The least values make a Deployment, a Service, an account and the test pod, and nothing for monitoring."""
    kinds = sorted(document["kind"] for document in documents(four.render(CHART, LEAST)))
    assert kinds == ["Deployment", "Pod", "Service", "ServiceAccount"]


@pytest.mark.parametrize("name", SETS)
def test_custom_objects_are_right_for_their_operator(name: str, four: Four) -> None:
    """ServiceMonitor, PodMonitor and PrometheusRule pass the operator's models, with no unknown field."""
    for document in documents(four.render(CHART, values_of(name))):
        if document["kind"] in CUSTOM:
            assert checked(document) == []


def test_all_three_kinds_are_seen(four: Four) -> None:
    """The sets of values have each of the custom kinds, so that the test before leaves none out."""
    assert {d["kind"] for name in SETS for d in documents(four.render(CHART, values_of(name)))} >= CUSTOM


def test_the_check_of_custom_objects_can_fail(four: Four) -> None:
    """A misspelt field and a wrong type are found."""
    [monitor] = of_kind(four.render(CHART, merged(LEAST, {"serviceMonitor": {"enabled": True}})), "ServiceMonitor")
    monitor["spec"]["endpoints"][0]["scrapeTimeOut"] = "1s"
    assert checked(monitor) == [".spec.endpoints[].scrapeTimeOut"]
    del monitor["spec"]["endpoints"][0]["scrapeTimeOut"]
    monitor["spec"]["endpoints"][0]["interval"] = "soon"
    with pytest.raises(ValidationError, match="interval"):
        checked(monitor)


@pytest.mark.parametrize("name", ["everything", "sidecar"])
def test_rendered_rules_pass_promtool(name: str, four: Four, tmp_path: Path) -> None:
    """promtool's strictest lint has nothing against the groups, with and without knobs, and counts all of them."""
    [rule] = of_kind(four.render(CHART, values_of(name)), "PrometheusRule")
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": rule["spec"]["groups"]}))
    done = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{sum(len(group['rules']) for group in rule['spec']['groups'])} rules found" in done.stdout + done.stderr


def test_without_knobs_the_rules_are_those_of_the_file(four: Four) -> None:
    """Group by group and rule by rule, the PrometheusRule is files/rules.yaml."""
    [rule] = of_kind(four.render(CHART, merged(LEAST, {"prometheusRule": {"enabled": True}})), "PrometheusRule")
    assert rule["spec"] == RULES


def test_every_alert_has_a_switch(four: Four) -> None:
    """Each alert can be switched off by its name, alone, and nothing else changes."""
    for name in ALERTS:
        assert rules_of(four, rules={name: {"enabled": False}}) == {
            other: rule for other, rule in ALERTS.items() if other != name
        }


def test_every_alert_has_knobs(four: Four) -> None:
    """for, keepFiringFor, severity, labels and annotations of each alert can be set; its expression stays."""
    knob = {
        "for": "42m",
        "keepFiringFor": "43m",
        "severity": "info",
        "labels": {"team": "night"},
        "annotations": {"dashboard_url": "https://grafana.example/d/flipwatch-server"},
    }
    for name, rule in rules_of(four, rules=dict.fromkeys(ALERTS, knob)).items():
        assert rule["for"] == "42m"
        assert rule["keep_firing_for"] == "43m"
        assert rule["labels"] == {**ALERTS[name]["labels"], "severity": "info", "team": "night"}
        assert rule["annotations"] == {**ALERTS[name]["annotations"], **knob["annotations"]}
        assert rule["expr"] == ALERTS[name]["expr"]


def test_runbooks_get_their_base(four: Four) -> None:
    """runbook_url is a URL with runbookUrlBase, with one slash between, and the path of the repository without."""
    for name, rule in rules_of(four, runbookUrlBase="https://git.example/flipwatch/").items():
        assert rule["annotations"]["runbook_url"] == f"https://git.example/flipwatch/docs/runbooks/{name}.md"


def test_labels_of_the_rules(four: Four) -> None:
    """ruleLabels are on every alert, and a knob's label wins over them; additionalLabels are on the object."""
    rules = rules_of(four, ruleLabels={"team": "day"}, rules={"FlipwatchHung": {"labels": {"team": "night"}}})
    assert {name: rule["labels"]["team"] for name, rule in rules.items() if rule["labels"]["team"] != "day"} == {
        "FlipwatchHung": "night"
    }
    values = merged(LEAST, {"prometheusRule": {"enabled": True, "additionalLabels": {"release": "prometheus"}}})
    assert of_kind(four.render(CHART, values), "PrometheusRule")[0]["metadata"]["labels"]["release"] == "prometheus"


def test_boards_are_those_of_the_files(four: Four) -> None:
    """One ConfigMap for each board, with the labels and the folder for Grafana's sidecar, and with the file's JSON."""
    found = {}
    for config in of_kind(four.render(CHART, values_of("everything")), "ConfigMap"):
        if config["metadata"]["labels"].get("grafana_dashboard") == "1":
            [(name, text)] = config["data"].items()
            found[name] = json.loads(text)
            assert config["metadata"]["annotations"]["grafana_folder"] == "Serving"
            assert config["metadata"]["namespace"] == "monitoring"
            assert len(text) < 1_000_000  # what a ConfigMap holds
    assert found == {board.name: json.loads(board.read_text()) for board in BOARDS}
    assert found


def test_monitors_select_what_there_is(four: Four) -> None:
    """A ServiceMonitor finds the chart's own Service and port, a PodMonitor those of sidecar.podSelector."""
    rendered = four.render(CHART, values_of("everything"))
    [monitor], [service] = of_kind(rendered, "ServiceMonitor"), of_kind(rendered, "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [end["port"] for end in monitor["spec"]["endpoints"]] == [port["name"] for port in service["spec"]["ports"]]
    [pods] = of_kind(four.render(CHART, values_of("sidecar")), "PodMonitor")
    assert pods["spec"]["selector"]["matchLabels"] == {"llm-d.ai/inferenceServing": "true"}
    assert pods["spec"]["namespaceSelector"]["matchNames"] == ["models"]
    assert pods["spec"]["podMetricsEndpoints"][0]["port"] == "http-flipwatch"


def test_network_policy_lets_through_what_is_needed_and_no_more(four: Four) -> None:
    """Ingress to one port from named peers and the test pod; egress to vLLM, DNS, and the receiver of alerts."""
    rendered = four.render(CHART, values_of("everything"))
    [policy], [pod] = of_kind(rendered, "NetworkPolicy"), of_kind(rendered, "Pod")
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    [ingress] = spec["ingress"]
    assert [port["port"] for port in ingress["ports"]] == ["http-flipwatch"]
    test, prometheus, api = ingress["from"]
    assert test["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert prometheus["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    assert api["podSelector"]["matchLabels"] == {"role": "operator"}
    assert [[port["port"] for port in rule["ports"]] for rule in spec["egress"]] == [[8443], [53, 53], [443], [8000]]
    assert all(rule["to"] for rule in spec["egress"])


@pytest.mark.parametrize(
    ("url", "port"), [("http://vllm", 80), ("https://vllm", 443), ("http://vllm:8000/x", 8000), ("http://[::1]:81", 81)]
)
def test_network_policy_takes_the_port_of_the_url(url: str, port: int, four: Four) -> None:
    """The port of vllm.url, or that of its scheme; networkPolicy.vllmPort wins."""
    peers = {"enabled": True, "prometheusFrom": [{"podSelector": {}}], "vllmTo": [{"podSelector": {}}]}
    values = merged(LEAST, {"vllm": {"url": url}, "networkPolicy": peers})
    [policy] = of_kind(four.render(CHART, values), "NetworkPolicy")
    assert policy["spec"]["egress"][0]["ports"] == [{"port": port, "protocol": "TCP"}]
    [policy] = of_kind(four.render(CHART, merged(values, {"networkPolicy": {"vllmPort": 7}})), "NetworkPolicy")
    assert policy["spec"]["egress"][0]["ports"] == [{"port": 7, "protocol": "TCP"}]
