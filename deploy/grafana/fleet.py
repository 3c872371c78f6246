"""The board of the fleet: which replica, which block, since when."""

from board import JSON, board
from codes import AWAY, symptom_codes, verdict_codes
from fleet_weights import integrity
from panels import BAD_ABOVE_ZERO, OVER_LIMIT, Column, Query, graph, stat, table, timeline
from promql import HELD, PLACED, age, coded, increase, known, largest, lateness, of, over_tau, rate, since, total
from server import UID
from states import NOT_KNOWN, PULSES, SYMPTOMS, VERDICTS, Look, mapped, numbered, yes_no

_BLOCK = f"{PLACED}, block"


def fleet() -> JSON:
    """The whole board."""
    return board(
        "flipwatch-fleet",
        "Flipwatch / fleet",
        "All vLLM servers with a Flipwatch sidecar. What is not known is grey or empty, never green.",
        {
            "Overview": _overview(),
            "Blocks": _blocks(),
            "Integrity of the weights, and GPUs": integrity(),
            "Answers": _answers(),
            "Mitigation": _mitigation(),
            "Cost of monitoring": _cost(),
        },
    )


def _to_server(instance: str) -> list[JSON]:
    variables = "${datasource:queryparam}&${job:queryparam}&${model_name:queryparam}"
    choices = "${score:queryparam}&${reference:queryparam}"
    url = f"/d/{UID}?{variables}&{choices}&var-instance=${{{instance}}}&${{__url_time_range}}"
    return [{"title": "This server", "url": url, "targetBlank": False}]


_CELL = _to_server("__data.fields.instance")
_ROW = _to_server("__field.labels.instance")


def _overview() -> list[JSON]:
    reached = f"present_over_time({of('flipwatch_up')}[$__range])"
    probe_away = f"sum(1 - {of('flipwatch_up')})"
    late = f"sum(max by (job, instance) ({lateness()}) > bool 3)"
    return [
        stat(
            "Servers by verdict",
            "How many servers have each verdict now. Servers whose sidecar is away are in none of them: see the next "
            "panel. No data: no sidecar answers.",
            (14, 5),
            [Query(f"sum by (verdict) ({of('flipwatch_verdict')})", "{{verdict}}")],
            colors={name: look.color for name, look in VERDICTS.items()},
        ),
        stat(
            "Sidecars",
            "Sidecars that Prometheus reached in the time shown, those of them that are away now, those whose probe "
            "does not answer, and those where a monitor's last run is older than three times its schedule. A monitor "
            "that never came to its end is not late, and a target that service discovery has dropped is in none of the "
            "last three.",
            (10, 5),
            [
                Query(f"count({known()})", "reached"),
                Query(f"sum((1 - {of('up')}) and on (job, instance) {reached})", "away"),
                Query(probe_away, "probe away"),
                Query(late, "late"),
            ],
            colors={"away": "red", "probe away": "orange", "late": "orange"},
        ),
        timeline(
            "Verdict by server",
            "The verdict of each server as it was. An empty stretch: Prometheus had no target there, so nothing is "
            "known. A click leads to the board of that server.",
            (24, 10),
            [Query(verdict_codes(PLACED), "{{instance}} {{pod}}")],
            mappings=numbered(VERDICTS, AWAY),
            links=_ROW,
        ),
        table(
            "Servers",
            "Each server now. Since: when the verdict became what it is; the left edge of the time shown means at "
            "least since then. The digest is that of the clean profile. No data: not measured, the probe is away, or "
            "there is no profile. 0 changed chunks and 0 flagged blocks hold for the last sweep and scan.",
            (24, 10),
            [
                Column(verdict_codes(PLACED), "verdict", mappings=numbered(VERDICTS, AWAY)),
                Column(since(of("flipwatch_verdict"), PLACED), "since", unit="dateTimeFromNow"),
                Column(total("flipwatch_block_flagged", by=PLACED), "flagged blocks", thresholds=BAD_ABOVE_ZERO),
                Column(
                    total("flipwatch_weights_changed_chunks", by=PLACED), "changed chunks", thresholds=BAD_ABOVE_ZERO
                ),
                Column(
                    f"max by ({PLACED}) ({over_tau(_BLOCK)})",
                    "largest z over tau",
                    decimals=2,
                    thresholds=OVER_LIMIT,
                ),
                Column(
                    f"sum by ({PLACED}) ({of('flipwatch_block_gate')} < bool 1)",
                    "gates below 1",
                    thresholds=((None, "text"), (1, "blue")),
                ),
                Column(age("flipwatch_last_scan_timestamp_seconds", PLACED), "last scan", unit="s", decimals=0),
                Column(age("flipwatch_sweep_timestamp_seconds", PLACED), "last sweep", unit="s", decimals=0),
                Column(largest("flipwatch_model_info", by=f"{PLACED}, model_name, vllm_version"), "1", shown=False),
                Column(largest("flipwatch_profile_info", by=f"{PLACED}, model_digest"), "2", shown=False),
                Column(largest("flipwatch_build_info", by=f"{PLACED}, version"), "3", shown=False),
            ],
            labels=["instance", "namespace", "pod", "model_name"],
            hidden=["job"],
            sort="largest z over tau",
            links={"instance": _CELL},
        ),
        timeline(
            "Alerts of Prometheus",
            "Alerts about Flipwatch that fire in Prometheus, those about no single server included. No row: none "
            "fires, or the rules are not loaded, or Prometheus evaluates them elsewhere. So an empty panel "
            "proves nothing.",
            (24, 6),
            [
                Query(
                    'max by (alertname, severity, instance) (ALERTS{alertname=~"Flipwatch.*", alertstate="firing"})',
                    "{{alertname}} ({{severity}}) {{instance}}",
                )
            ],
            mappings=mapped({"1": Look("fires", "red")}),
            values=False,
        ),
    ]


def _marked(metric: str) -> str:
    """What a metric of blocks says of those that something points at."""
    gates = f"({of('flipwatch_block_gate')} < 1)"
    anything = f"{of('flipwatch_block_flagged')} == 1 or {of('flipwatch_block_departs')} == 1 or {gates}"
    return f"{metric} and on ({_BLOCK}) ({anything})"


def _blocks() -> list[JSON]:
    return [
        table(
            "Blocks that something points at",
            "Blocks that the last scan flagged, that depart from their reference, or whose gate is not 1, on any "
            "server. Flagged since: the left edge of the time shown means at least since then. An empty table: nothing "
            "points at a block, or nothing was measured; the verdicts above tell which.",
            (24, 8),
            [
                Column(
                    _marked(largest("flipwatch_block_flagged", by=_BLOCK)),
                    "flagged",
                    mappings=yes_no(Look("flagged", "red"), Look("no", "text")),
                ),
                Column(since(of("flipwatch_block_flagged"), _BLOCK), "flagged since", unit="dateTimeFromNow"),
                Column(_marked(f"({over_tau(_BLOCK)})"), "z over tau", decimals=2, thresholds=OVER_LIMIT),
                Column(_marked(largest("flipwatch_block_skip_gain_t", by=_BLOCK)), "skip gain, t", decimals=1),
                Column(
                    _marked(largest("flipwatch_block_loss_without_nats", by=_BLOCK)),
                    "loss without it, nats",
                    decimals=3,
                ),
                Column(
                    _marked(largest("flipwatch_block_departs", by=_BLOCK)),
                    "departs",
                    mappings=yes_no(Look("departs", "red"), Look("no", "text")),
                ),
                Column(_marked(largest("flipwatch_block_gate", by=_BLOCK)), "gate", decimals=2),
            ],
            labels=["instance", "namespace", "pod", "block"],
            hidden=["job"],
            sort="flagged",
            links={"instance": _CELL},
        ),
        graph(
            "Largest z over tau, any server and block",
            "The ten largest of the chosen score. Above 1 a block stands out in its model; that alone flags nothing. "
            "Lines stay level between two scans.",
            (12, 8),
            [Query(f"topk(10, {over_tau(_BLOCK)})", "block {{block}} {{instance}} {{pod}}")],
        ),
        graph(
            "Loss as served, nats per token",
            "Replicas of one model that hold the same weights have the same loss, up to rounding. A line ends where "
            "the loss is not finite, or the sidecar is away.",
            (12, 8),
            [Query(largest("flipwatch_base_loss_nats", by=PLACED), "{{instance}} {{pod}}")],
        ),
    ]


def _answers() -> list[JSON]:
    return [
        timeline(
            "Pulse by server",
            "Whether vLLM moves while there is work. Idle says only that no request is there.",
            (12, 8),
            [Query(coded("flipwatch_pulse", "state", PULSES, PLACED), "{{instance}} {{pod}}")],
            mappings=numbered(PULSES),
            links=_ROW,
        ),
        timeline(
            "Symptom of the canary's answers by server",
            "What is wrong with the answers to the fixed prompts. Not known: the prompts could not be sent, or there "
            "is nothing to compare with.",
            (12, 8),
            [Query(symptom_codes(PLACED), "{{instance}} {{pod}}")],
            mappings=numbered(SYMPTOMS, Look("not known", NOT_KNOWN)),
            links=_ROW,
        ),
    ]


def _mitigation() -> list[JSON]:
    return [
        graph(
            "Blocks that are not as they should be, by server",
            "Blocks whose gate is below 1. A line ends while the probe is away. 0 says nothing of whether a block "
            "ought to be taken out.",
            (8, 8),
            [Query(f"sum by ({PLACED}) ({of('flipwatch_block_gate')} < bool 1)", "{{instance}} {{pod}}")],
        ),
        timeline(
            "Drained",
            "Servers that a drain of Flipwatch keeps out of rotation. Not drained is grey: it is no sign of health.",
            (8, 8),
            [Query(largest("flipwatch_drained", by=PLACED), "{{instance}} {{pod}}")],
            mappings=yes_no(Look("drained", "blue"), Look("serves", NOT_KNOWN)),
            links=_ROW,
        ),
        graph(
            "Mitigations, all servers",
            "Done and failed, by action, around each moment.",
            (8, 8),
            [
                Query(increase("flipwatch_mitigations_total", "action"), "{{action}}"),
                Query(increase("flipwatch_mitigation_failures_total", "action"), "{{action}} failed"),
            ],
            bars=True,
        ),
    ]


def _cost() -> list[JSON]:
    return [
        graph(
            "Share of time for which the engine is held, by server",
            "By scans, sweeps and comparisons together. 0: nothing ran, so nothing was looked at either.",
            (12, 8),
            [Query(" + ".join(rate(metric, PLACED) for metric in HELD.values()), "{{instance}} {{pod}}")],
            unit="percentunit",
        ),
        graph(
            "Age of the last scan by server",
            "A saw-tooth while all is well; a line that keeps rising is a server that nobody scans. No line: it has "
            "never been scanned.",
            (12, 8),
            [Query(age("flipwatch_last_scan_timestamp_seconds", PLACED), "{{instance}} {{pod}}")],
            unit="s",
        ),
    ]
