"""Every set of values: the same objects from Helm 3 and 4, valid for Kubernetes, and hardened."""

import json
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from conftest import CHART, LEAST, ROOT, SETS, values_of
from engines import Four, Three, documents

KUBERNETES = ("1.29", "1.37")
"""The first version that the chart allows, and the newest that there are schemas of."""

CUSTOM = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
"""Kinds of the Prometheus Operator; test_monitoring.py looks at them."""

SKIPPED = {
    "CKV2_K8S_6": "the test pod lives for a second; which network a pod of vLLM is in is not for this chart to say",
    "CKV_K8S_8": "the test pod ends by itself, so that liveness has no meaning there",
    "CKV_K8S_9": "readiness is off on purpose: what Flipwatch thinks is no reason to take a pod out of its Service",
    "CKV_K8S_15": "IfNotPresent on purpose: a pod of vLLM must not wait for a registry",
    "CKV_K8S_35": "what vLLM was given as --api-key, and the webhook's URL, are settings that no file can hold",
    "CKV_K8S_43": "the digest is the operator's; one set of values has one",
}
"""Checks of checkov that are not asked for, each with its reason."""


@pytest.mark.parametrize("name", SETS)
def test_both_engines_render_the_same(name: str, light_chart: Path, three: Three, four: Four) -> None:
    """Helm 3 and Helm 4 make the same objects of a set of values; the hook, a test pod, comes from Helm 4 only."""
    old = documents(three.render(light_chart, values_of(name)))
    new = [d for d in documents(four.render(light_chart, values_of(name))) if d["kind"] != "Pod"]
    assert sorted(map(_key, old)) == sorted(map(_key, new))
    assert new


@pytest.mark.parametrize("name", SETS)
def test_objects_are_valid_for_kubernetes(name: str, four: Four) -> None:
    """Every object passes the strict schemas of the oldest and of the newest Kubernetes."""
    checked = 0
    for document in documents(four.render(CHART, values_of(name))):
        if document["kind"] not in CUSTOM:
            for version in KUBERNETES:
                kubernetes_validate.validate(document, version, strict=True)
            checked += 1
    assert checked


def test_the_validation_can_fail(four: Four) -> None:
    """A field that does not exist is found, so that the test before means something."""
    deployment = next(d for d in documents(four.render(CHART, LEAST)) if d["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessprobe"):
        kubernetes_validate.validate(deployment, KUBERNETES[0], strict=True)


def test_strict_lint_finds_nothing(three: Three, four: Four) -> None:
    """Helm's strict lint has neither errors nor warnings, in both versions."""
    assert four.lint(CHART) == []
    for name in SETS:
        assert "[ERROR]" not in (said := three.lint(CHART, values_of(name)))
        assert "[WARNING]" not in said


def test_checkov_finds_nothing(four: Four, tmp_path: Path) -> None:
    """checkov has nothing against any set of values, but for the checks that SKIPPED has a reason for."""
    for name in SETS:
        objects = [d for d in documents(four.render(CHART, values_of(name))) if d["kind"] not in CUSTOM]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(objects))
    parts = yaml.safe_load((ROOT / "deploy" / "sidecar-snippet.yaml").read_text())
    (tmp_path / "sidecar.yaml").write_text(yaml.safe_dump(_pod_of(parts)))
    report = _checkov(tmp_path)
    failed = {(check["check_id"], check["check_name"], check["resource"]) for check in report["failed_checks"]}
    assert {check for check in failed if check[0] not in SKIPPED} == set()
    assert set(SKIPPED) <= {check[0] for check in failed}, "a check that is skipped without need"
    assert len(report["passed_checks"]) > 100


def _key(document: dict[str, object]) -> str:
    return json.dumps(document, sort_keys=True)


def _pod_of(parts: dict[str, object]) -> dict[str, object]:
    """A Deployment with nothing in it but the sidecar, so that what is found is ours."""
    [sidecar] = parts["initContainers"]
    del sidecar["restartPolicy"]
    template = {
        "metadata": {"labels": {"app": "sidecar"}},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [sidecar],
            "volumes": parts["volumes"],
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "sidecar", "namespace": "models"},
        "spec": {"selector": {"matchLabels": {"app": "sidecar"}}, "template": template},
    }


def _checkov(folder: Path) -> dict[str, list[dict[str, str]]]:
    """checkov's report on the manifests in a folder; it lives in an environment of its own."""
    program = ROOT / ".venv-deploy" / "checkov" / "bin" / "checkov"
    assert program.exists(), "There is no checkov: run `make test-chart`."
    done = subprocess.run(
        [str(program), "--framework", "kubernetes", "--skip-download", "--compact", "-o", "json", "-d", str(folder)],
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    return report["results"]
