"""The board of the fleet: the bytes, and the GPUs that hold them."""

from board import JSON
from codes import AWAY, verdict_codes
from panels import BAD_ABOVE_ZERO, Column, Query, graph, table
from promql import PLACED, of, total
from states import VERDICTS, numbered

XID = "DCGM_FI_DEV_XID_ERRORS"
_CARD = "Hostname, gpu, UUID, modelName"


def integrity() -> list[JSON]:
    """What sweeps say of the bytes, and what the GPUs' driver said."""
    # A scrape that keeps Prometheus' own labels renames those of dcgm-exporter to exported_*.
    renamed = (
        f"label_replace(label_replace({XID}{{exported_pod!=''}}, "
        "'pod', '$1', 'exported_pod', '(.+)'), 'namespace', '$1', 'exported_namespace', '(.+)')"
    )
    cards = f"max by (namespace, pod, {_CARD}) ({renamed} or {XID}{{exported_pod='', pod!=''}})"
    in_pods = f"max by (namespace, pod) ({verdict_codes(PLACED)})"
    servers = (
        f'label_replace(label_replace({of("flipwatch_verdict")} == 1, "host", "$1", "instance", "([^:]+)(:[0-9]+)?"), '
        '"host", "$1", "node", "(.+)")'
    )
    hosts = f'max by (host) (label_replace({XID}, "host", "$1", "Hostname", "(.+)"))'
    on_hosts = f"max by (host, instance, verdict) ({servers}) * on (host) group_left () {hosts}"
    return [
        graph(
            "Changed chunks by server",
            "Chunks that differ from the baseline, from sweep to sweep. 0 says nothing of bytes that no digest covers, "
            "nor of a change before the baseline. A line ends while the probe is away.",
            (12, 8),
            [Query(total("flipwatch_weights_changed_chunks", by=PLACED), "{{instance}} {{pod}}")],
        ),
        graph(
            "Share of the weights that a digest covers",
            "By server. What is not covered can change unseen.",
            (12, 8),
            [
                Query(
                    f"{total('flipwatch_weights_covered_bytes', by=PLACED)} / "
                    f"{total('flipwatch_weights_bytes', by=PLACED)}",
                    "{{instance}} {{pod}}",
                )
            ],
            unit="percentunit",
        ),
        table(
            "Xid errors of the GPUs under these servers",
            "The last Xid code of each GPU of the same pod, from dcgm-exporter, beside the verdict. 0: none since "
            "its start. Needs the labels namespace and pod on both. Memory can be corrupted without any Xid.",
            (12, 8),
            [
                Column(
                    f"{cards} and on (namespace, pod) {in_pods}",
                    "last Xid",
                    thresholds=BAD_ABOVE_ZERO,
                ),
                Column(
                    f"0 * {cards} + on (namespace, pod) group_left () {in_pods}",
                    "verdict",
                    mappings=numbered(VERDICTS, AWAY),
                ),
            ],
            labels=["namespace", "pod", "Hostname", "gpu", "modelName"],
            hidden=["UUID"],
            sort="last Xid",
        ),
        table(
            "Xid errors of the hosts of these servers",
            "The same by host, for servers outside of pods or where dcgm-exporter does not know the pod: the largest "
            "code of all GPUs of the host, also of those that the server does not use. The host is the sidecar's label "
            "node, or else the host in its instance.",
            (12, 8),
            [Column(on_hosts, "last Xid", thresholds=BAD_ABOVE_ZERO)],
            labels=["instance", "verdict", "host"],
            sort="last Xid",
        ),
        graph(
            "Xid errors of all GPUs",
            "The last Xid code of each GPU that dcgm-exporter sees, also without a Flipwatch sidecar; it stays until "
            "the exporter restarts. No data: no dcgm-exporter, or it does not export this field.",
            (24, 7),
            [Query(f"max by ({_CARD}) ({XID})", "{{Hostname}} GPU {{gpu}}")],
        ),
    ]
