"""Prometheus' rules, its configuration, Alertmanager's: checked by the real programs, and held against the code."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flipwatch.monitors.verdict.verdict import Verdict
from flipwatch.service.alert import ALERTING, NAMES, VERDICT, Alert

from .rules import FOREIGN, GOLDEN, ROOT, RULES_FILE, alerts, exported, metrics_in, records, rules

PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTMANAGER = ROOT / "deploy" / "alertmanager" / "alertmanager.yml"
TESTS = (PROMETHEUS / "rules_test.yml", PROMETHEUS / "rules_day_test.yml")


def _run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    found = shutil.which(program)
    assert found is not None, (
        f"{program} is missing: apt-get install --no-install-recommends prometheus{{,-alertmanager}}"
    )
    return subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=ROOT)


def _routed(**labels: str) -> list[str]:
    words = [f"{name}={value}" for name, value in labels.items()]
    routed = _run("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", *words)
    assert routed.returncode == 0, routed.stderr
    return routed.stdout.strip().split(",")


def _tests() -> list[dict[str, Any]]:
    return [test for file in TESTS for test in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]]


def _queries() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each test with each of its queries."""
    return [(test, query) for test in _tests() for query in test.get("promql_expr_test", [])]


def test_promtool_accepts_the_rules() -> None:
    """With all lints, and none of them is only a warning."""
    checked = _run("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES_FILE)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_rules_do_what_their_unit_tests_say() -> None:
    """The tests run on the link that Prometheus reads, which is the chart's file."""
    assert (PROMETHEUS / "rules.yml").resolve() == RULES_FILE
    tested = _run("promtool", "test", "rules", *TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_promtool_accepts_the_configuration() -> None:
    """And finds the rule file where the configuration says."""
    checked = _run("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "1 rule files found" in checked.stdout


def test_every_rule_has_a_unit_test_that_sees_it() -> None:
    """Each alert is expected to fire somewhere, and each record to have a value; a sample of a function has no name."""
    expected = "\n".join(sample["labels"] for _, query in _queries() for sample in query["exp_samples"])
    firing = set(re.findall(r'ALERTS\{alertname="(\w+)", alertstate="firing"', expected))
    assert firing == {alert["alert"] for alert in alerts()}
    assert {line.split("{")[0] for line in expected.splitlines()} - {"ALERTS", ""} == records()


def test_the_healthy_server_has_every_metric_that_alerts_use() -> None:
    """And no alert at all: silence of an alert that has nothing to read would show nothing."""
    healthy = _tests()[0]
    given = {series["series"].split("{")[0] for series in healthy["input_series"]}
    used = {name for alert in alerts() for name in metrics_in(alert["expr"])}
    # Of a record that an alert reads: what that is made of.
    used |= {name for rule in rules() if rule.get("record") in used for name in metrics_in(rule["expr"])}
    assert used - records() <= given
    assert [query["exp_samples"] for query in healthy["promql_expr_test"]] == [[], [], []]
    assert {query["expr"] for query in healthy["promql_expr_test"]} == {"ALERTS"}


def test_an_alert_that_waits_is_shown_to_wait() -> None:
    """For each rule with `for` a test looks for it firing before that time, and finds nothing."""
    nothing = [
        (test["name"], query["expr"])
        for test, query in _queries()
        if not query["exp_samples"] and 'alertstate="firing"' in query["expr"]
    ]
    for alert in alerts():
        if "for" in alert:
            name = alert["alert"]
            assert any(name in expr or (name in said and "alertname" not in expr) for said, expr in nothing), name


def test_every_metric_exists() -> None:
    """In the golden file of the sidecar's metrics, among the records, or among the few that are not its own."""
    for rule in rules():
        unknown = metrics_in(rule["expr"]) - exported() - records() - FOREIGN
        assert not unknown, f"{rule.get('alert') or rule['record']} uses {unknown}"
    assert metrics_in('flipwatch_nonsense{alert="flipwatch_up"} > up') == {"flipwatch_nonsense", "up"}


def test_the_sidecars_own_alerts_are_all_there_with_its_severities() -> None:
    """Under the sidecar's names; the verdict has a rule for each severity, and together they have all verdicts."""
    severities = {alert["alert"]: alert["labels"]["severity"] for alert in alerts()}
    for name in NAMES:
        if name != VERDICT:
            assert severities[name] == Alert(name, "", None, 0.0, "", "").severity, name
    exceptions = {verdict for verdict, severity in ALERTING.items() if severity != "critical"}
    assert exceptions == {Verdict.LATENT_WEIGHT_FAULT}
    exprs = {alert["alert"]: alert["expr"] for alert in alerts()}
    assert exprs["FlipwatchVerdict"] == 'flipwatch_verdict_firing{verdict!="latent_weight_fault"} == 1'
    assert exprs["FlipwatchVerdictLatent"] == 'flipwatch_verdict_firing{verdict="latent_weight_fault"} == 1'
    assert (severities["FlipwatchVerdict"], severities["FlipwatchVerdictLatent"]) == ("critical", "warning")
    # The label values in matchers are words of the code; the job is that of prometheus.yml and of the chart's monitors.
    golden = GOLDEN.read_text(encoding="utf-8")
    for alert in alerts():
        for name, value in re.findall(r'(\w+)="(\w+)"', alert["expr"]):
            assert (name, value) == ("job", "flipwatch") or f'="{value}"' in golden, f"{alert['alert']}: {value}"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_wording(alert: dict[str, Any]) -> None:
    """A static summary and a description, both sentences, the latter with the server's name; a runbook; a severity."""
    assert set(alert) <= {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    notes = alert["annotations"]
    assert notes.keys() == {"summary", "description", "runbook_url"}
    assert re.fullmatch(r"[A-Z][^{}]*[a-z]\.", notes["summary"])
    assert re.fullmatch(r"(?s)[A-Z{].*\.", notes["description"])
    assert "{{ $labels.instance }}" in notes["description"] or alert["expr"].startswith("absent(")
    assert notes["runbook_url"] == f"docs/runbooks/{alert['alert']}.md"


def test_aggregations_keep_the_labels_of_the_target() -> None:
    """Neither `by` nor `on`, which would drop the namespace and the pod of a fleet."""
    for rule in rules():
        assert not re.search(r"\b(by|on)\s*\(", rule["expr"]), rule


def test_amtool_accepts_the_example() -> None:
    """Alertmanager's own checker."""
    checked = _run("amtool", "check-config", ALERTMANAGER)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_where_alerts_go() -> None:
    """By severity; changed weights also to the sidecar, and nothing else goes there."""
    assert _routed(alertname="FlipwatchVerdict", severity="critical", verdict="weight_fault") == [
        "flipwatch-repair",
        "page",
    ]
    assert _routed(alertname="FlipwatchVerdictLatent", severity="warning", verdict="latent_weight_fault") == [
        "flipwatch-repair",
        "ticket",
    ]
    for alert in alerts():
        for verdict in ("old_fault", "serving_fault", "hung") if alert["alert"] == "FlipwatchVerdict" else ("",):
            severity = alert["labels"]["severity"]
            wanted = {"critical": "page", "warning": "ticket", "info": "nobody"}[severity]
            assert _routed(alertname=alert["alert"], severity=severity, verdict=verdict or "none") == [wanted]


def test_the_example_inhibits_only_alerts_that_exist_and_no_page_but_the_symptoms() -> None:
    """All names in it are those of rules; the verdict's symptoms are held back there, never the verdict."""
    example = yaml.safe_load(ALERTMANAGER.read_text(encoding="utf-8"))
    names = {alert["alert"] for alert in alerts()}
    for rule in example["inhibit_rules"]:
        for matcher in rule["source_matchers"] + rule["target_matchers"]:
            assert set(re.findall(r"Flipwatch\w+", matcher)) <= names
        assert {"namespace", "pod", "job", "instance"} <= set(rule["equal"])
    held = {
        name for rule in example["inhibit_rules"] for name in re.findall(r"Flipwatch\w+", str(rule["target_matchers"]))
    }
    assert {name for name in NAMES if name not in (VERDICT,)} <= held
    assert VERDICT not in held
    assert {alert["alert"] for alert in alerts() if alert["labels"]["severity"] == "critical"} - held == {
        VERDICT,
        "FlipwatchAbsent",
    }


def test_the_webhook_sends_a_token_from_a_file_and_says_when_it_is_over() -> None:
    """No token stands in the example; what is resolved is sent too."""
    example = yaml.safe_load(ALERTMANAGER.read_text(encoding="utf-8"))
    hooks = [hook for receiver in example["receivers"] for hook in receiver.get("webhook_configs", [])]
    assert [hook["url"] for hook in hooks] == ["http://flipwatch:9477/v1/alertmanager/repair"]
    assert all(hook["send_resolved"] for hook in hooks)
    for hook in hooks:
        assert hook["http_config"]["authorization"].keys() == {"type", "credentials_file"}
