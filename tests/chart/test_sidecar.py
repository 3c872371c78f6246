"""The sidecar in pods of vLLM, in the form of each public chart: valid, watched, and unable to harm the model."""

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from conftest import CHART, ROOT, merged
from engines import Four, documents, of_kind
from harm import harms

FORMS = Path(__file__).parent / "forms"
SIDECAR: dict[str, Any] = {
    "form": "sidecar",
    "existingSecret": "flipwatch",
    "image": {"repository": "registry.example/flipwatch"},
}
FULL: dict[str, Any] = {
    "mode": "enforce",
    "secretKeys": {"vllmApiKey": "key", "peerToken": "peer", "webhookUrl": "hook"},
    "settings": {"scan": {"every_minutes": 10}},
    "automation": {"existingConfigMap": "policy"},
}
PATHS: dict[str, tuple[tuple[str, ...], str]] = {
    "llm-d-modelservice": (("spec", "template", "spec"), "vllm"),
    "kserve-inferenceservice": (("spec", "predictor"), "kserve-container"),
    "kserve-llminferenceservice": (("spec", "template"), "main"),
}
"""Form -> where its pod spec is, and what vLLM's container is called."""
PATCHED = ("production-stack", "vllm-chart-helm")
NO_FIELDS_OF_A_POD = {"minReplicas"}


def rendered(what: str, values: dict[str, Any]) -> str:
    """Text of the parts or of the patch, with the head that `helm template --show-only` prints."""
    with helm.Chart.load(str(CHART)) as chart:
        name = f"flipwatch/templates/sidecar-{what}.yaml"
        text = chart.render(merged(values, {"sidecar": {"render": what}}), name="flipwatch", namespace="default")[name]
    return f"---\n# Source: {name}\n" + text.lstrip("\n")


def put_in(pod: dict[str, Any], container: str, parts: dict[str, Any]) -> dict[str, Any]:
    """The pod spec with the parts where the table of the chart's README says."""
    pod = copy.deepcopy(pod)
    pod["initContainers"] = parts["initContainers"] + pod.get("initContainers", [])
    pod["volumes"] = pod.get("volumes", []) + parts["volumes"]
    [vllm] = [c for c in pod["containers"] if c["name"] == container]
    for key in ("env", "volumeMounts"):
        vllm[key] = vllm.get(key, []) + parts["containers"][0][key]
    return {**pod, "enableServiceLinks": parts["enableServiceLinks"]}


def validate(pod: dict[str, Any]) -> None:
    """Strict schemas of Kubernetes on the pod spec, oldest and newest."""
    spec = {key: value for key, value in pod.items() if key not in NO_FIELDS_OF_A_POD}
    for version in ("1.29", "1.37"):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, version, strict=True
        )


def form(name: str) -> list[dict[str, Any]]:
    """The objects of one form."""
    return list(yaml.safe_load_all((FORMS / f"{name}.yaml").read_text()))


def post_rendered(name: str) -> list[dict[str, Any]]:
    """The objects of one form after deploy/kustomize/production-stack/render.sh."""
    done = subprocess.run(
        [str(ROOT / "deploy" / "kustomize" / "production-stack" / "render.sh")],
        input=(FORMS / f"{name}.yaml").read_text(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize(
    ("what", "path"),
    [("parts", "deploy/sidecar-snippet.yaml"), ("patch", "deploy/kustomize/production-stack/sidecar.yaml")],
)
def test_rendered_files_are_in_step(what: str, path: str) -> None:
    """The files are what the command in their head prints."""
    assert (ROOT / path).read_text() == rendered(what, SIDECAR)


@pytest.mark.parametrize("values", [SIDECAR, merged(SIDECAR, FULL)], ids=["least", "full"])
@pytest.mark.parametrize("name", PATHS)
def test_parts_fit_into_each_form(name: str, values: dict[str, Any]) -> None:
    """In the place that each chart has for it, the sidecar makes a valid and watched pod, and cannot harm it."""
    path, container = PATHS[name]
    [before] = form(name)
    for key in path:
        before = before[key]
    if name == "llm-d-modelservice":
        # Its proxy has vLLM's usual port.
        values = merged(values, {"vllm": {"url": "http://127.0.0.1:8200"}})
    after = put_in(before, container, yaml.safe_load(rendered("parts", values)))
    validate(after)
    assert harms(before, after) == []
    _is_watched(after, container)


@pytest.mark.parametrize("name", PATCHED)
def test_patch_fits_into_each_form(name: str) -> None:
    """Kustomize puts the sidecar first into the engines of charts without a place for it; nothing else changes."""
    before, after = form(name), post_rendered(name)
    assert len(before) == len(after)
    by_name = {document["metadata"]["name"]: document for document in after}
    for old in before:
        new = by_name[old["metadata"]["name"]]
        if not old["metadata"]["name"].endswith("-deployment-vllm"):
            assert new == old
            continue
        kubernetes_validate.validate(new, "1.29", strict=True)
        pod = new["spec"]["template"]["spec"]
        validate(pod)
        assert pod["initContainers"][0]["name"] == "flipwatch"
        assert [c["name"] for c in pod["initContainers"][1:]] == [
            c["name"] for c in old["spec"]["template"]["spec"]["initContainers"]
        ]
        assert harms(old["spec"]["template"]["spec"], pod) == []
        _is_watched(pod, "vllm")


def _secrets(pod: dict[str, Any], container: dict[str, Any]) -> list[dict[str, Any]]:
    """The Secrets of ours that a container sees."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    names = [mount["name"] for mount in container["volumeMounts"] if mount["name"].startswith("flipwatch-")]
    return [volumes[name]["secret"] for name in names if "secret" in volumes[name]]


def _is_watched(pod: dict[str, Any], container: str) -> None:
    """vLLM and the sidecar read the same key of the same Secret, and vLLM sees no other key of it."""
    [vllm] = [c for c in pod["containers"] if c["name"] == container]
    [sidecar] = [c for c in pod["initContainers"] if c["name"] == "flipwatch"]
    env = {v["name"]: v.get("value") for v in vllm["env"]}
    assert env["VLLM_PLUGINS"] == "flipwatch"
    ours = {v["name"]: v.get("value") for v in sidecar["env"]}
    assert env["FLIPWATCH_PROBE_TOKEN_FILE"] == ours["FLIPWATCH_PROBE_TOKEN_FILE"]
    [of_vllm], [of_sidecar] = _secrets(pod, vllm), _secrets(pod, sidecar)
    assert of_vllm["secretName"] == of_sidecar["secretName"] == "flipwatch"
    assert [item["key"] for item in of_vllm["items"]] == ["probe-token"]
    port = ours["FLIPWATCH_VLLM__URL"].rpartition(":")[2]
    ports = [str(p["containerPort"]) for p in vllm.get("ports", [])]
    assert not ports or port in ports


HARMFUL: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no restartPolicy": lambda pod: pod["initContainers"][0].pop("restartPolicy"),
    "a startup probe": lambda pod: pod["initContainers"][0].update(startupProbe={"httpGet": {}}),
    "an end at the first mistake": lambda pod: pod["initContainers"][0].update(args=["serve"]),
    "a hook": lambda pod: pod["initContainers"][0].update(lifecycle={"postStart": {}}),
    "a readiness probe": lambda pod: pod["initContainers"][0].update(readinessProbe={"httpGet": {}}),
    "liveness of the model": lambda pod: pod["initContainers"][0]["livenessProbe"]["httpGet"].update(path="/readyz"),
    "impatience": lambda pod: pod["initContainers"][0]["livenessProbe"].update(failureThreshold=1),
    "a GPU": lambda pod: [r.update({"nvidia.com/gpu": 1}) for r in pod["initContainers"][0]["resources"].values()],
    "another QoS": lambda pod: pod["initContainers"][0]["resources"]["requests"].update(cpu="1m"),
    "a pull at each start": lambda pod: pod["initContainers"][0].update(imagePullPolicy="Always"),
    "vLLM's port": lambda pod: pod["initContainers"][0]["ports"][0].update(containerPort=8200),
    "a Secret that must exist": lambda pod: pod["volumes"][-1]["secret"].update(optional=False),
    "a full folder": lambda pod: pod["volumes"][2].update(emptyDir={"sizeLimit": "1Gi"}),
    "a claim": lambda pod: pod["volumes"][2].update(persistentVolumeClaim=pod["volumes"][2].pop("emptyDir")),
    "vLLM's own probe": lambda pod: pod["containers"][0].update(readinessProbe={}),
    "a lost variable": lambda pod: pod["containers"][0]["env"].pop(0),
    "an ordinary container": lambda pod: pod["containers"].append(pod["initContainers"].pop(0)),
    "host network": lambda pod: pod.update(hostNetwork=True),
}


@pytest.mark.parametrize("how", HARMFUL)
def test_each_harm_is_seen(how: str) -> None:
    """What the tests before look for is found where it is there."""
    [deployment] = form("llm-d-modelservice")
    before = deployment["spec"]["template"]["spec"]
    after = put_in(before, "vllm", yaml.safe_load(rendered("parts", SIDECAR)))
    assert harms(before, after) == []
    HARMFUL[how](after)
    assert harms(before, after) != []


def test_gate_on_health_is_the_only_readiness() -> None:
    """With readiness.gateOnHealth the sidecar has a readiness probe on /readyz, and nothing else changes."""
    plain, gated = (
        yaml.safe_load(rendered("parts", merged(SIDECAR, {"readiness": {"gateOnHealth": on}}))) for on in (False, True)
    )
    probe = gated["initContainers"][0].pop("readinessProbe")
    assert probe["httpGet"] == {"path": "/readyz", "port": "http-flipwatch"}
    assert gated == plain


def test_sidecar_release_has_no_workload(four: Four) -> None:
    """Form sidecar makes no pod, no Service and no policy in front of vLLM: it cannot touch what serves."""
    values = yaml.safe_load((CHART / "ci" / "sidecar-values.yaml").read_text())
    found = {document["kind"] for document in documents(four.render(CHART, values))}
    assert found == {"ConfigMap", "PodMonitor", "PrometheusRule"}


def test_another_chart_can_include_the_templates(tmp_path: Path, four: Four) -> None:
    """A chart that depends on this one gets the same sidecar by the named templates, and a ConfigMap for it."""
    parent = tmp_path / "serving"
    (parent / "templates").mkdir(parents=True)
    shutil.copytree(CHART, parent / "charts" / "flipwatch")
    (parent / "Chart.yaml").write_text(
        "apiVersion: v2\nname: serving\nversion: 1.0.0\ndependencies:\n  - {name: flipwatch, version: 0.1.0}\n"
    )
    (parent / "templates" / "deployment.yaml").write_text(PARENT)
    made = four.render(parent, {"flipwatch": merged(SIDECAR, FULL)})
    [deployment] = of_kind(made, "Deployment")
    kubernetes_validate.validate(deployment, "1.29", strict=True)
    pod = deployment["spec"]["template"]["spec"]
    before = {"containers": [{"name": "vllm", "image": "registry.example/vllm-flipwatch:1"}]}
    assert harms(before, pod) == []
    _is_watched(pod, "vllm")
    [config] = of_kind(made, "ConfigMap")
    assert config["metadata"]["name"] in {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v}


PARENT = """
apiVersion: apps/v1
kind: Deployment
metadata:
  name: serving
spec:
  selector:
    matchLabels: {app: serving}
  template:
    metadata:
      labels: {app: serving}
    spec:
      initContainers:
        {{- include "flipwatch.sidecar" .Subcharts.flipwatch | nindent 8 }}
      containers:
        - name: vllm
          image: registry.example/vllm-flipwatch:1
          env:
            {{- include "flipwatch.vllmEnv" .Subcharts.flipwatch | nindent 12 }}
          volumeMounts:
            {{- include "flipwatch.vllmVolumeMounts" .Subcharts.flipwatch | nindent 12 }}
      volumes:
        {{- include "flipwatch.sidecarVolumes" .Subcharts.flipwatch | nindent 8 }}
"""
