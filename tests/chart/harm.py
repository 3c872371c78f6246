"""What a sidecar could do to the model in its pod, as far as a manifest tells."""

from collections.abc import Iterator
from typing import Any

PATIENCE_SECONDS = 60
"""A sidecar that hangs is not restarted sooner: while it restarts, its pod is not ready."""

KEPT = (
    "image",
    "command",
    "args",
    "ports",
    "resources",
    "securityContext",
    "startupProbe",
    "livenessProbe",
    "readinessProbe",
)
"""What must stay as it was in vLLM's container."""


def harms(before: dict[str, Any], after: dict[str, Any], gated: bool = False) -> list[str]:
    """Ways in which the sidecar in the pod spec `after` could keep the model from starting or take it out of rotation.

    `before` is the pod spec without it; `gated`: a readiness probe was asked for.
    """
    found = list(_of_the_sidecar(after, gated))
    mounted = {mount["name"] for c in _ours(after) for mount in c["volumeMounts"]}
    added = [v for v in after["volumes"] if v not in before.get("volumes", [])]
    found += [
        f"volume {v['name']} is not mounted by us"
        for v in added
        if v["name"] not in mounted | _new_mounts(before, after)
    ]
    for volume in added:
        found += _of_a_volume(volume)
    found += _of_the_others(before, after)
    return found


def _ours(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for c in pod.get("initContainers", []) + pod["containers"] if c["name"] == "flipwatch"]


def _of_the_sidecar(pod: dict[str, Any], gated: bool) -> Iterator[str]:
    natives = [c for c in pod.get("initContainers", []) if c["name"] == "flipwatch"]
    if len(natives) != 1 or len(_ours(pod)) != 1:
        yield "it is not one init container"
        return
    [sidecar] = natives
    if sidecar.get("restartPolicy") != "Always":
        yield "the kubelet waits for its end: no restartPolicy: Always"
    if "--stay" not in sidecar["args"]:
        yield "it ends where it cannot start, and its pod is not ready meanwhile"
    yield from (f"the kubelet waits for it: {key}" for key in ("startupProbe", "lifecycle") if key in sidecar)
    if ("readinessProbe" in sidecar) != gated:
        yield "its readiness decides on the pod's" if not gated else "no readiness probe though asked for"
    live = sidecar["livenessProbe"]
    if live["httpGet"] != {"path": "/livez", "port": "http-flipwatch"} or live.keys() & {"exec", "tcpSocket", "grpc"}:
        yield "its liveness looks at something else than the process"
    if live["periodSeconds"] * live["failureThreshold"] < PATIENCE_SECONDS:
        yield "its liveness is impatient"
    for variable in sidecar["env"]:
        for kind in ("secretKeyRef", "configMapKeyRef"):
            if not variable.get("valueFrom", {}).get(kind, {"optional": True}).get("optional"):
                yield f"the kubelet waits for what {variable['name']} names"
    if sidecar["imagePullPolicy"] == "Always":
        yield "the pod waits for the registry at each start"
    if sidecar["resources"]["requests"] != sidecar["resources"]["limits"]:
        yield "a Guaranteed pod is so no more"
    if sidecar["resources"]["limits"].keys() - {"cpu", "memory"}:
        yield "it takes a GPU, or may be evicted for its files"
    taken = {
        p["containerPort"]
        for c in pod["containers"] + pod["initContainers"]
        if c is not sidecar
        for p in c.get("ports", [])
    }
    if taken & {port["containerPort"] for port in sidecar["ports"]} or any("hostPort" in p for p in sidecar["ports"]):
        yield "its port may be taken"


def _new_mounts(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    old = [c["name"] + m["name"] for c in before["containers"] for m in c.get("volumeMounts", [])]
    return {
        m["name"] for c in after["containers"] for m in c.get("volumeMounts", []) if c["name"] + m["name"] not in old
    }


def _of_a_volume(volume: dict[str, Any]) -> Iterator[str]:
    name = volume["name"]
    for kind in ("secret", "configMap"):
        if kind in volume and volume[kind].get("optional") is not True:
            yield f"the kubelet waits for volume {name}"
    if volume.get("emptyDir"):
        yield f"the pod is evicted where volume {name} is full, or it takes memory"
    if not volume.keys() & {"secret", "configMap", "emptyDir"}:
        yield f"the kubelet waits for volume {name}"


def _of_the_others(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key in before.keys() | after.keys() - {"containers", "initContainers", "volumes", "enableServiceLinks"}:
        if key not in ("containers", "initContainers", "volumes") and before.get(key) != after.get(key):
            yield f"{key} of the pod has changed"
    olds = {c["name"]: c for c in before["containers"] + before.get("initContainers", [])}
    news = {c["name"]: c for c in after["containers"] + after["initContainers"] if c["name"] != "flipwatch"}
    if olds.keys() != news.keys():
        yield "other containers have come or gone"
    for name in olds.keys() & news.keys():
        yield from (f"{key} of {name} has changed" for key in KEPT if olds[name].get(key) != news[name].get(key))
        variables = news[name].get("env") or []
        yield from (f"{name} has lost {v['name']}" for v in olds[name].get("env") or [] if v not in variables)
