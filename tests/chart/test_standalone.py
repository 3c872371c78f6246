"""The Deployment beside an existing server, the notes, and the package that a registry would hold."""

from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from conftest import CHART, LEAST, SETS, merged, values_of
from engines import Four, documents, of_kind


def pod_of(four: Four, values: dict[str, Any]) -> dict[str, Any]:
    """Pod spec of the Deployment."""
    [deployment] = of_kind(four.render(CHART, values), "Deployment")
    return deployment["spec"]["template"]["spec"]


def test_one_process_with_one_store(four: Four) -> None:
    """One replica, and the old one ends before the new one starts."""
    [deployment] = of_kind(four.render(CHART, LEAST), "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_defaults_observe_and_depend_on_nothing(four: Four) -> None:
    """Mode observe; liveness is the process and nothing else; nothing waits; no token of Kubernetes."""
    pod = pod_of(four, LEAST)
    [container] = pod["containers"]
    assert {"name": "FLIPWATCH_MITIGATION__MODE", "value": "observe"} in container["env"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert not container.keys() & {"readinessProbe", "startupProbe", "lifecycle"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False


def test_files_of_the_secret_are_for_our_group_only(four: Four) -> None:
    """The Secret is mounted as files, 0440, of the pod's group; nothing of it stands in a manifest."""
    pod = pod_of(four, LEAST)
    [secret] = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert secret == {"secretName": "flipwatch", "defaultMode": 0o440}
    assert pod["securityContext"]["fsGroup"] == 65532


def test_store_on_a_claim(four: Four) -> None:
    """persistence makes a claim that outlives the release, or uses a given one; else the folder ends with the pod."""
    rendered = four.render(CHART, values_of("standalone-pvc"))
    [claim] = of_kind(rendered, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"

    def data(values: dict[str, Any]) -> dict[str, Any]:
        return next(volume for volume in pod_of(four, values)["volumes"] if volume["name"] == "flipwatch-data")

    assert data(values_of("standalone-pvc"))["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert data(values_of("everything"))["persistentVolumeClaim"]["claimName"] == "flipwatch-store"
    assert data(LEAST)["emptyDir"] == {"sizeLimit": "1Gi"}


def test_digest_wins_over_tag(four: Four) -> None:
    """An image with a digest is named by it; else by the tag, else by the version of the chart's Flipwatch."""

    def image(**values: str) -> str:
        [container] = pod_of(four, merged(LEAST, {"image": values}))["containers"]
        return str(container["image"])

    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert image() == f"registry.example/flipwatch:{version}"
    assert image(tag="7") == "registry.example/flipwatch:7"
    digest = "sha256:" + "0" * 64
    assert image(tag="7", digest=digest) == f"registry.example/flipwatch@{digest}"


def test_every_object_has_the_recommended_labels(four: Four) -> None:
    """Kubernetes' recommended labels are on each object but the test pod, and commonLabels too."""
    wanted = {"name", "instance", "version", "component", "part-of", "managed-by"}
    for document in documents(four.render(CHART, values_of("everything"))):
        if document["kind"] != "Pod":
            labels = document["metadata"]["labels"]
            assert {f"app.kubernetes.io/{key}" for key in wanted} | {"helm.sh/chart"} <= labels.keys()
            assert labels["environment"] == "production"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("default", ["mode observe", "then set mode to dry-run", "prometheusRule (no alert in Prometheus)"]),
        ("enforce", ["mode enforce", "and so does the policy", "serviceMonitor (nobody scrapes"]),
        ("everything", ["mode dry-run", "set mode to enforce", "Off: nothing."]),
        ("sidecar", ["for sidecars in the pods of vLLM", "readiness.gateOnHealth (a drain takes no pod"]),
    ],
)
def test_notes_say_mode_next_step_and_what_is_off(name: str, words: list[str], four: Four) -> None:
    """The notes name the mode, how to read /metrics, what comes next, and what is off."""
    notes = four.render(CHART, values_of(name))["flipwatch/templates/NOTES.txt"]
    for word in [*words, "curl -s http://127.0.0.1:9477/metrics"]:
        assert word in notes


def test_package_renders_as_the_folder_does(four: Four, tmp_path: Path) -> None:
    """The packaged chart has rules and boards in it, renders the same objects, and leaves the tests' values out."""
    package = Path(helm.package(str(CHART), destination=str(tmp_path)))
    for name in SETS:
        assert four.render(package, values_of(name)) == four.render(CHART, values_of(name))
    assert package.stat().st_size < 1_000_000
