"""Values that the chart refuses, each with a sentence that says why; and what an upgrade may leave out."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CHART, LEAST, Refusals, merged, values_of
from engines import Four, RefusedError, Three, of_kind

BY_SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"form": "daemonset"}, "form"),
    ({"mode": "act"}, "mode"),
    ({"mode": True}, "mode"),
    ({"replicas": 2}, "replicas"),
    ({"vllm": {"url": "vllm:8000"}}, "vllm/url"),
    ({"vllm": {"uri": "http://vllm:8000"}}, "uri"),
    ({"existingSecret": "My_Secret"}, "existingSecret"),
    ({"secretKeys": {"probeToken": ""}}, "probeToken"),
    ({"secretKeys": {"token": "x"}}, "token"),
    ({"image": {"digest": "sha256:abc"}}, "digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"image": {"tag": 1.0}}, "tag"),
    ({"settings": {"scan": {"every_minute": 5}}}, "every_minute"),
    ({"settings": {"scan": {"duty": 2}}}, "duty"),
    ({"settings": {"scan": {"strategy": "fast"}}}, "strategy"),
    ({"settings": {"listen_port": 1}}, "listen_port"),
    ({"settings": {"probe_token": "secret"}}, "probe_token"),
    ({"settings": {"tokens": []}}, "tokens"),
    ({"settings": {"vllm": {"api_key": "secret"}}}, "api_key"),
    ({"settings": {"mitigation": {"mode": "enforce"}}}, "mode"),
    ({"settings": {"automation": {"rules": []}}}, "automation"),
    ({"settings": {"differential": {"peer_token": "secret"}}}, "peer_token"),
    ({"automation": {"rules": [{"verdict": "weight_fault", "action": "reboot"}]}}, "action"),
    ({"automation": {"rules": [{"verdict": "weight_fault"}]}}, "action"),
    ({"automation": {"rules": [{"verdict": "hung", "action": "drain", "when": 1}]}}, "when"),
    ({"persistence": {"size": "1 GB"}}, "size"),
    ({"persistence": {"accessModes": ["ReadWriteMany"]}}, "accessModes"),
    ({"resources": {"limit": {}}}, "limit"),
    ({"service": {"port": 0}}, "port"),
    ({"service": {"port": "http"}}, "port"),
    ({"sidecar": {"vllmPlugins": "lora"}}, "vllmPlugins"),
    ({"readiness": {"gateOnHealth": "yes"}}, "gateOnHealth"),
    ({"serviceMonitor": {"interval": "30"}}, "interval"),
    ({"serviceMonitor": {"interval": ""}}, "interval"),
    ({"podMonitor": {"interval": "1h30"}}, "interval"),
    ({"podMonitor": {"honorLabels": True}}, "honorLabels"),
    ({"prometheusRule": {"rules": {"FlipwatchHung": {"for": "5 minutes"}}}}, "for"),
    ({"prometheusRule": {"rules": {"FlipwatchHung": {"severity": "page"}}}}, "severity"),
    ({"prometheusRule": {"rules": {"FlipwatchHung": {"threshold": 3}}}}, "threshold"),
    ({"prometheusRule": {"runbookUrlBase": "git.example"}}, "runbookUrlBase"),
    ({"prometheusRule": {"extraGroups": [{"name": "ours"}]}}, "rules"),
    ({"dashboards": {"labels": {"grafana_dashboard": 1}}}, "grafana_dashboard"),
    ({"networkPolicy": {"vllmPort": 70000}}, "vllmPort"),
    ({"extraEnv": {"A": "b"}}, "extraEnv"),
    ({"extraEnv": [{"value": "b"}]}, "name"),
    ({"listenHost": "0.0.0"}, "listenHost"),
    ({"listenHost": "256.0.0.1"}, "listenHost"),
    ({"listenHost": "pod.models"}, "listenHost"),
    ({"listenHost": "1::2::3"}, "listenHost"),
    ({"listenHost": "0.0.0.0:9477"}, "listenHost"),
    ({"podLabels": {"team": 1}}, "team"),
    ({"prometheus": {"enabled": True}}, "prometheus"),
    # What Kubernetes takes for no name, or YAML for something else.
    ({"image": {"repository": "registry.example/a: b #c"}}, "image/repository"),
    ({"image": {"repository": "registry.example/Flipwatch"}}, "image/repository"),
    ({"image": {"repository": "registry.example/flipwatch:1.0"}}, "image/repository"),
    ({"image": {"tag": "a: b"}}, "image/tag"),
    ({"image": {"tag": "a" * 129}}, "image/tag"),
    ({"priorityClassName": "a: b"}, "priorityClassName"),
    ({"persistence": {"storageClass": "a #b"}}, "storageClass"),
    ({"imagePullSecrets": [{"name": "a: b"}]}, "imagePullSecrets"),
    ({"imagePullSecrets": [{"secret": "a"}]}, "imagePullSecrets"),
    ({"serviceAccount": {"name": "a..b"}}, "serviceAccount"),
    ({"fullnameOverride": "a.b"}, "fullnameOverride"),
    ({"fullnameOverride": "1a"}, "fullnameOverride"),
    ({"nameOverride": "a_b"}, "nameOverride"),
    ({"dashboards": {"namespace": "a.b"}}, "dashboards/namespace"),
]
"""Values, and the part of the engine's message that names what is wrong."""

SIDECAR = {"form": "sidecar"}
POLICED = {"networkPolicy": {"enabled": True, "prometheusFrom": [{"podSelector": {}}], "vllmTo": [{"podSelector": {}}]}}

BY_TEMPLATE: list[tuple[dict[str, Any], str]] = [
    ({"existingSecret": ""}, "existingSecret is empty: create a Secret"),
    ({"image": {"repository": ""}}, "image.repository is empty: build the image"),
    ({"vllm": {"url": ""}}, "vllm.url is empty: name the Service"),
    ({"readiness": {"gateOnHealth": True}}, "readiness.gateOnHealth needs form: sidecar"),
    ({**SIDECAR, "persistence": {"enabled": True}}, "persistence is for form: standalone"),
    ({**SIDECAR, "networkPolicy": {"enabled": True}}, "it would cut off the model's own callers"),
    ({**SIDECAR, "serviceMonitor": {"enabled": True}}, "enable podMonitor instead"),
    ({**SIDECAR, "podMonitor": {"enabled": True}}, "sidecar.podSelector is empty"),
    ({"sidecar": {"render": "parts"}}, "sidecar.render needs form: sidecar"),
    ({"sidecar": {"render": "patch"}}, "sidecar.render needs form: sidecar"),
    ({"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}, "everything would be scraped twice"),
    (
        {"serviceMonitor": {"enabled": True, "interval": "1m", "scrapeTimeout": "1m1s"}},
        "serviceMonitor.scrapeTimeout (1m1s) is longer than serviceMonitor.interval (1m)",
    ),
    ({"podMonitor": {"enabled": True, "interval": "900ms", "scrapeTimeout": "1s"}}, "podMonitor.scrapeTimeout (1s)"),
    (
        {"automation": {"rules": [{"verdict": "hung", "action": "drain"}], "existingConfigMap": "policy"}},
        "automation.rules and automation.existingConfigMap are both set",
    ),
    (
        {"settings": {"differential": {"peer_url": "http://peer:8000"}}},
        "settings.differential.peer_url needs secretKeys.peerToken",
    ),
    (
        {"prometheusRule": {"enabled": True, "rules": {"FlipwatchNothing": {"enabled": False}}}},
        "prometheusRule.rules.FlipwatchNothing is no alert of this chart: it has FlipwatchAbsent, ",
    ),
    (
        {"prometheusRule": {"enabled": True, "rules": {"FlipwatchHung": {"enabled": False, "for": "1m"}}}},
        "prometheusRule.rules.FlipwatchHung is off (enabled: false) and tuned",
    ),
    (
        {
            "prometheusRule": {
                "enabled": True,
                "rules": {"FlipwatchHung": {"severity": "info", "labels": {"severity": "warning"}}},
            }
        },
        "prometheusRule.rules.FlipwatchHung has severity and labels.severity",
    ),
    (
        {"prometheusRule": {"enabled": True, "extraGroups": [{"name": "flipwatch.faults", "rules": []}]}},
        "prometheusRule.extraGroups has a group named flipwatch.faults",
    ),
    (merged(POLICED, {"networkPolicy": {"prometheusFrom": []}}), "networkPolicy.prometheusFrom is empty"),
    (merged(POLICED, {"networkPolicy": {"vllmTo": []}}), "networkPolicy.vllmTo is empty"),
    (
        merged(POLICED, {"secretKeys": {"webhookUrl": "hook"}}),
        "networkPolicy.webhookTo is empty",
    ),
]
"""Values that are each allowed and make no sense together, or that lack what nobody can guess, and the sentence."""


@pytest.mark.parametrize(("values", "named"), BY_SCHEMA, ids=lambda part: part if isinstance(part, str) else None)
def test_schema_refuses(values: dict[str, Any], named: str, refusals: Refusals) -> None:
    """A wrong type, word, duration or name is refused by both versions of Helm, which say where it is."""
    for said in refusals(values):
        assert "schema" in said
        assert named in said


@pytest.mark.parametrize(("values", "sentence"), BY_TEMPLATE, ids=lambda part: part if isinstance(part, str) else None)
def test_template_refuses(values: dict[str, Any], sentence: str, refusals: Refusals) -> None:
    """What is missing or contradicts itself is refused with one sentence."""
    for said in refusals(values):
        assert sentence in said


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "0:0:0:0:0:0:0:1", "::0001", "::ffff:7f00:1"]
)
@pytest.mark.parametrize("form", ["standalone", "sidecar"])
def test_loopback_is_refused(form: str, host: str, refusals: Refusals) -> None:
    """On loopback the kubelet reaches no /livez, and restarts the container again and again."""
    for said in refusals({"form": form, "listenHost": host}):
        assert f"listenHost ({host}) is loopback, where the kubelet cannot reach /livez" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.127.0.1", "fd00::1", "fd00:0:0:1:2:3:4:5"])  # noqa: S104
def test_other_addresses_pass(host: str, four: Four) -> None:
    """An address that is not loopback is handed on."""
    [deployment] = of_kind(four.render(CHART, merged(LEAST, {"listenHost": host})), "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "FLIPWATCH_LISTEN_HOST", "value": host} in container["env"]


def test_a_good_duration_and_a_good_knob_pass(four: Four) -> None:
    """The same knobs with right values render, so that it is the wrong ones that are refused."""
    good = {
        "serviceMonitor": {"enabled": True, "interval": "1m30s", "scrapeTimeout": "1m30s"},
        "prometheusRule": {"enabled": True, "rules": {"FlipwatchHung": {"for": "0s", "severity": "warning"}}},
    }
    assert of_kind(four.render(CHART, merged(LEAST, good)), "ServiceMonitor")


def test_an_upgrade_that_knows_none_of_the_newer_values_renders(three: Three, four: Four) -> None:
    """`--reuse-values` leaves out what an older release did not know: the result is that of the defaults."""
    needed = {*LEAST, "form", "resources", "podSecurityContext", "securityContext"}
    nothing = {key: None for key in _defaults() if key not in needed} | LEAST
    for engine in (four, three):
        rendered = engine.render(CHART, nothing)
        assert rendered.keys() == engine.render(CHART, LEAST).keys()
        assert of_kind(rendered, "Deployment") == of_kind(engine.render(CHART, LEAST), "Deployment")
        assert of_kind(rendered, "Service") == of_kind(engine.render(CHART, LEAST), "Service")


@pytest.mark.parametrize("name", ["everything", "sidecar", "standalone-pvc"])
def test_each_value_may_be_missing(name: str, four: Four) -> None:
    """Any one value may be null: the chart renders, or says in a sentence of its own what it needs."""
    values = values_of(name)
    for key in _defaults():
        if key == "form":
            continue
        said = ""
        try:
            four.render(CHART, {**values, key: None})
        except RefusedError as refused:
            said = str(refused)
        assert re.fullmatch(r"(execution error at \(\S+\): [a-zA-Z._]+ (is empty|needs)\b.+\.)?", said), key


def test_null_for_no_clock_reaches_flipwatch(light_chart: Path, three: Three, four: Four) -> None:
    """`every_minutes: null` means no scan by the clock, and is no missing value."""
    for engine in (four, three):
        [config] = of_kind(engine.render(light_chart, values_of("everything")), "ConfigMap")[:1]
        settings = yaml.safe_load(config["data"]["flipwatch.yaml"])
        assert settings["scan"]["every_minutes"] is None


def _defaults() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())
