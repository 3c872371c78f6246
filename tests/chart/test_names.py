"""Names and labels: valid for Kubernetes, text in YAML, and unlike those of another release."""

from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
from conftest import CHART, LEAST, Refusals, merged, values_of
from engines import Four, documents, of_kind

REPEATED: list[tuple[dict[str, Any], str]] = [
    (
        {"commonLabels": {"app.kubernetes.io/name": "x"}},
        "commonLabels has the label app.kubernetes.io/name, which the chart sets itself: remove it.",
    ),
    ({"podLabels": {"app.kubernetes.io/component": "x"}}, "podLabels has the label app.kubernetes.io/component"),
    ({"service": {"labels": {"helm.sh/chart": "x"}}}, "service.labels has the label helm.sh/chart"),
    (
        {"serviceMonitor": {"additionalLabels": {"app.kubernetes.io/instance": "x"}}},
        "serviceMonitor.additionalLabels has the label app.kubernetes.io/instance",
    ),
    (
        {"commonLabels": {"team": "a"}, "podLabels": {"team": "b"}},
        "podLabels has the label team, which commonLabels has too: keep one of the two.",
    ),
    (
        {"commonLabels": {"grafana_dashboard": "1"}},
        "dashboards.labels has the label grafana_dashboard, which commonLabels has too",
    ),
    (
        {"podAnnotations": {"checksum/config": "x"}},
        "podAnnotations has the annotation checksum/config, which the chart sets itself: remove it.",
    ),
    (
        {"persistence": {"annotations": {"helm.sh/resource-policy": "delete"}}},
        "persistence.annotations has the annotation helm.sh/resource-policy",
    ),
    (
        {"dashboards": {"folder": "a", "annotations": {"grafana_folder": "b"}}},
        "dashboards.annotations has the annotation grafana_folder",
    ),
]
"""Labels and annotations that would stand in an object twice, and the sentence."""


@pytest.mark.parametrize(
    "repository",
    ["flipwatch", "localhost:5000/flipwatch", "registry.example:443/a/b-c/flip__watch", "Registry.example/a.b/c"],
)
def test_good_repositories_pass(repository: str, four: Four) -> None:
    """With and without a registry, a port and folders, so that it is the wrong ones that are refused."""
    [deployment] = of_kind(four.render(CHART, merged(LEAST, {"image": {"repository": repository}})), "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"].startswith(f"{repository}:")


@pytest.mark.parametrize(("values", "sentence"), REPEATED, ids=lambda part: part if isinstance(part, str) else None)
def test_nothing_stands_in_an_object_twice(values: dict[str, Any], sentence: str, refusals: Refusals) -> None:
    """A label or an annotation that the object has already is refused with one sentence: the selector needs them."""
    for said in refusals(values):
        assert sentence in said


def test_names_stay_text_and_numbers_numbers(four: Four) -> None:
    """Names of digits only, or that are words of YAML, are text in each object, and a large number is no 1e+06."""
    values = merged(
        values_of("everything"),
        {
            "existingSecret": "123",
            "secretKeys": {"probeToken": "1", "vllmApiKey": "2", "webhookUrl": "3"},
            "automation": {"existingConfigMap": "null"},
            "persistence": {"existingClaim": "true"},
            "priorityClassName": "1e3",
            "serviceAccount": {"name": "456"},
            "imagePullSecrets": [{"name": "789"}],
            "terminationGracePeriodSeconds": 1_000_000,
            "nameOverride": "7",
            "fullnameOverride": "y",
            "serviceMonitor": {"namespace": "1", "interval": "0", "scrapeTimeout": "0"},
            "dashboards": {"folderAnnotation": "5"},
        },
    )
    objects = [d for d in documents(four.render(CHART, values)) if d["apiVersion"] != "monitoring.coreos.com/v1"]
    for document in objects:
        kubernetes_validate.validate(document, "1.29", strict=True)
        assert document["metadata"]["labels"]["app.kubernetes.io/name"] == "7"
    [claim] = of_kind(four.render(CHART, merged(LEAST, CLAIM)), "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "12"
    [monitor] = of_kind(four.render(CHART, values), "ServiceMonitor")
    assert monitor["metadata"]["namespace"] == "1"
    assert monitor["spec"]["endpoints"][0]["interval"] == "0"


CLAIM = {"persistence": {"enabled": True, "storageClass": "12"}}


def of_release(values: dict[str, Any], release: str, namespace: str = "models") -> list[dict[str, Any]]:
    """The objects of a release with this name."""
    with helm.Chart.load(str(CHART)) as chart:
        return documents(chart.render(merged(LEAST, values), name=release, namespace=namespace))


@pytest.mark.parametrize(
    ("values", "release"),
    [
        ({"fullnameOverride": "a" * 62 + "--b"}, "prod"),
        ({"nameOverride": "a" * 62 + ".b"}, "prod"),
        ({"nameOverride": "b" * 70}, "team.prod"),
        ({}, "team.prod"),
        ({}, "team.flipwatch"),
    ],
)
def test_names_that_are_cut_are_names(values: dict[str, Any], release: str) -> None:
    """The name of the Service is a label of DNS, and labels end as they have to, wherever a long name is cut."""
    for document in of_release({**values, "dashboards": {"enabled": True}}, release):
        name = document["metadata"]["name"]
        assert name.strip("-.") == name
        if document["kind"] == "Service":
            assert len(name) <= 63
            assert "." not in name
        label = document["metadata"]["labels"]["app.kubernetes.io/name"]
        assert len(label) <= 63
        assert label.strip("-.") == label


def test_a_service_cannot_begin_with_a_digit() -> None:
    """A release whose name begins with a digit is told to name fullnameOverride, with which it renders."""
    with pytest.raises(helm.HelmError, match="begins with a digit, which the name of a Service cannot: set fullname"):
        of_release({}, "7b")
    assert of_release({"fullnameOverride": "seven"}, "7b")


def test_releases_of_two_namespaces_do_not_collide() -> None:
    """Objects that two releases of one name put into one namespace have names of their own; at home they are short."""
    elsewhere = {
        kind: {"enabled": True, "namespace": "monitoring"}
        for kind in ("serviceMonitor", "prometheusRule", "dashboards")
    }

    def names(values: dict[str, Any], namespace: str) -> set[tuple[str, str]]:
        objects = of_release(values, "flipwatch", namespace)
        return {(d["kind"], d["metadata"]["name"]) for d in objects if d["metadata"]["namespace"] == "monitoring"}

    first, second = names(elsewhere, "models-a"), names(elsewhere, "models-b")
    assert len(first) == len(second) == 4
    assert not first & second
    assert ("ConfigMap", "models-a.flipwatch-board-server") in first
    at_home = names(elsewhere, "monitoring")
    assert ("ConfigMap", "flipwatch-board-server") in at_home
    assert ("PrometheusRule", "flipwatch") in at_home
    pods = {
        "form": "sidecar",
        "podMonitor": {"enabled": True, "namespace": "monitoring"},
        "sidecar": {"podSelector": {"a": "b"}},
    }
    assert names(pods, "models-a") == {("PodMonitor", "models-a.flipwatch")}
