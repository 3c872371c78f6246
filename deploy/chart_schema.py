"""Write helm/flipwatch/values.schema.json: the chart's own values, and in them the model of Flipwatch's settings.

    .venv/bin/python deploy/chart_schema.py

A setting that does not exist is refused at `helm install`, and not by a container that ends at once.  Settings that the
chart sets itself (where it listens, files, tokens) or has values of its own for are left out.
"""

import json
from pathlib import Path
from typing import Any

from flipwatch.service.settings import Settings

CHART = Path(__file__).parent.parent / "helm" / "flipwatch"

OF_THE_CHART = {
    "Settings": (
        "listen_host",
        "listen_port",
        "data_dir",
        "probe_token",
        "probe_token_file",
        "tokens",
        "tokens_file",
        "automation",
    ),
    "VllmSettings": ("url", "api_key"),
    "MitigationSettings": ("mode",),
    "DifferentialSettings": ("peer_token", "peer_token_file"),
}
"""Model -> its settings that have no place in the value `settings`."""

_PARTS = r"([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?"
TEXT: dict[str, Any] = {"type": "string"}
FLAG: dict[str, Any] = {"type": "boolean"}
OBJECT: dict[str, Any] = {"type": "object"}
OBJECTS: dict[str, Any] = {"type": "array", "items": OBJECT}
TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": TEXT}
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
NAME: dict[str, Any] = {"type": "string", "pattern": f"^({_LABEL}(\\.{_LABEL})*)?$"}
REQUIRED_NAME: dict[str, Any] = {**NAME, "minLength": 1}
NAMESPACE: dict[str, Any] = {"type": "string", "pattern": f"^({_LABEL})?$", "maxLength": 63}
KEY: dict[str, Any] = {"type": "string", "pattern": "^[-._a-zA-Z0-9]*$"}
REQUIRED_KEY: dict[str, Any] = {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$"}
DURATION: dict[str, Any] = {"type": "string", "pattern": f"^(0|{_PARTS})$", "minLength": 1}
MAYBE_DURATION: dict[str, Any] = {"type": "string", "pattern": f"^(0|{_PARTS})$"}
SIZE: dict[str, Any] = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"}
_HOST = r"(\[[0-9a-fA-F:]+\]|[a-zA-Z0-9]([-.a-zA-Z0-9]*[a-zA-Z0-9])?)"
_FOLDER = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
REPOSITORY: dict[str, Any] = {"type": "string", "pattern": f"^(({_HOST}(:[0-9]+)?/)?{_FOLDER}(/{_FOLDER})*)?$"}
PORT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65535}


def closed(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def one_of(*words: str) -> dict[str, Any]:
    """One of a few words."""
    return {"enum": list(words)}


def address() -> dict[str, Any]:
    """An address of IPv4 or IPv6; and localhost, which the template refuses with a sentence, as all of loopback."""
    byte, part = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])", "[0-9a-fA-F]{1,4}"
    forms = [rf"{byte}(\.{byte}){{3}}", f"({part}:){{7}}{part}", f"({part}:){{1,7}}:", f":(:{part}){{1,7}}", "::"]
    forms += [f"({part}:){{1,{7 - after}}}(:{part}){{1,{after}}}" for after in range(1, 7)]
    return {"type": "string", "pattern": f"^({'|'.join(forms)}|localhost)$"}


def monitor() -> dict[str, Any]:
    """What ServiceMonitor and PodMonitor share."""
    return closed(
        enabled=FLAG,
        namespace=NAMESPACE,
        interval=DURATION,
        scrapeTimeout=MAYBE_DURATION,
        additionalLabels=TEXTS,
        relabelings=OBJECTS,
        metricRelabelings=OBJECTS,
    )


def knobs() -> dict[str, Any]:
    """What can be turned on one alert."""
    severity = one_of("critical", "warning", "info")
    return closed(
        enabled=FLAG, **{"for": DURATION}, keepFiringFor=DURATION, severity=severity, labels=TEXTS, annotations=TEXTS
    )


def settings() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of the value `settings`, and the definitions it refers to."""
    whole = Settings.model_json_schema()
    models = whole.pop("$defs")
    models["Settings"] = whole
    for name, gone in OF_THE_CHART.items():
        for key in gone:
            del models[name]["properties"][key]
    models = {name: _bare(model) for name, model in models.items()}
    used: dict[str, Any] = {}
    _gather("Settings", models, used)
    return {"$ref": "#/$defs/Settings"}, dict(sorted(used.items()))


def _bare(node: Any) -> Any:
    """Without words for people, which stand in README.md, and defaults, which are Flipwatch's and not the chart's."""
    if isinstance(node, list):
        return [_bare(part) for part in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _bare(part) for name, part in value.items()} if key == "properties" else _bare(value)
        for key, value in node.items()
        if key not in {"title", "description", "default"}
    }


def _gather(name: str, models: dict[str, Any], used: dict[str, Any]) -> None:
    if name in used:
        return
    used[name] = models[name]
    for other in models:
        if json.dumps(f"#/$defs/{other}") in json.dumps(models[name]):
            _gather(other, models, used)


def schema() -> dict[str, Any]:
    """The whole schema."""
    of_flipwatch, definitions = settings()
    rules = {"type": "array", "items": {"$ref": "#/$defs/Rule"}}
    definitions |= _rule()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "Made by deploy/chart_schema.py.",
        "type": "object",
        "additionalProperties": False,
        "required": ["form"],
        "properties": {
            "global": OBJECT,
            "form": one_of("standalone", "sidecar"),
            "mode": one_of("observe", "dry-run", "enforce"),
            "vllm": closed(url={"type": "string", "pattern": "^(https?://[^ /]+/?.*)?$"}),
            "settings": of_flipwatch,
            "automation": closed(rules=rules, existingConfigMap=NAME, existingConfigMapKey=REQUIRED_KEY),
            "listenHost": address(),
            "existingSecret": NAME,
            "secretKeys": closed(probeToken=REQUIRED_KEY, tokens=KEY, vllmApiKey=KEY, peerToken=KEY, webhookUrl=KEY),
            "image": closed(
                repository=REPOSITORY,
                tag={"type": "string", "pattern": "^([a-zA-Z0-9_][-._a-zA-Z0-9]{0,127})?$"},
                digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
                pullPolicy=one_of("IfNotPresent", "Always", "Never"),
            ),
            "imagePullSecrets": {"type": "array", "items": {**closed(name=REQUIRED_NAME), "required": ["name"]}},
            "sidecar": closed(
                podSelector=TEXTS,
                namespaces={"type": "array", "items": NAMESPACE},
                vllmPlugins={"type": "string", "pattern": "(^|,)flipwatch(,|$)"},
                render=one_of("", "parts", "patch"),
            ),
            "readiness": closed(gateOnHealth=FLAG),
            "persistence": closed(
                enabled=FLAG,
                existingClaim=NAME,
                storageClass=NAME,
                accessModes={
                    "type": "array",
                    "minItems": 1,
                    "items": one_of("ReadWriteOnce", "ReadWriteOncePod"),
                },
                size=SIZE,
                annotations=TEXTS,
            ),
            "resources": closed(limits=OBJECT, requests=OBJECT, claims=OBJECTS),
            "podSecurityContext": OBJECT,
            "securityContext": OBJECT,
            "service": closed(
                type=one_of("ClusterIP", "NodePort", "LoadBalancer"), port=PORT, labels=TEXTS, annotations=TEXTS
            ),
            "serviceAccount": closed(create=FLAG, name=NAME, annotations=TEXTS),
            "extraEnv": {
                "type": "array",
                "items": {"type": "object", "required": ["name"], "properties": {"name": TEXT}},
            },
            "extraVolumes": OBJECTS,
            "extraVolumeMounts": OBJECTS,
            "extraContainers": OBJECTS,
            "podLabels": TEXTS,
            "podAnnotations": TEXTS,
            "priorityClassName": NAME,
            "nodeSelector": TEXTS,
            "tolerations": OBJECTS,
            "affinity": OBJECT,
            "topologySpreadConstraints": OBJECTS,
            "terminationGracePeriodSeconds": {"type": "integer", "minimum": 1},
            "nameOverride": NAME,
            "fullnameOverride": {"type": "string", "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$"},
            "commonLabels": TEXTS,
            "serviceMonitor": monitor(),
            "podMonitor": monitor(),
            "prometheusRule": closed(
                enabled=FLAG,
                namespace=NAMESPACE,
                additionalLabels=TEXTS,
                ruleLabels=TEXTS,
                runbookUrlBase={"type": "string", "pattern": "^(https?://.+)?$"},
                rules={"type": "object", "additionalProperties": knobs()},
                extraGroups={
                    "type": "array",
                    "items": {"type": "object", "required": ["name", "rules"]},
                },
            ),
            "dashboards": closed(
                enabled=FLAG,
                namespace=NAMESPACE,
                labels=TEXTS,
                annotations=TEXTS,
                folder=TEXT,
                folderAnnotation=REQUIRED_KEY,
            ),
            "networkPolicy": closed(
                enabled=FLAG,
                prometheusFrom=OBJECTS,
                apiFrom=OBJECTS,
                vllmTo=OBJECTS,
                vllmPort={"type": "integer", "minimum": 0, "maximum": 65535},
                dnsTo=OBJECTS,
                webhookTo=OBJECTS,
                extraEgress=OBJECTS,
            ),
        },
        "$defs": definitions,
    }


def _rule() -> dict[str, Any]:
    """The model of a rule of the policy, and what it refers to."""
    models = {name: _bare(model) for name, model in Settings.model_json_schema()["$defs"].items()}
    used: dict[str, Any] = {}
    _gather("Rule", models, used)
    return used


def written() -> str:
    """The text of the file."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(written(), encoding="utf-8")
