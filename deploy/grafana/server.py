"""The board of one server: what is wrong, in which block, since when, what was done, and what the watching costs."""

from board import JSON, board, by_query
from codes import AWAY, verdict_codes
from panels import BAD_ABOVE_ZERO, LATE, Query, stat, timeline
from promql import (
    LAST,
    age,
    coded,
    largest,
    lateness,
    of_vllm,
    total,
)
from server_blocks import blocks
from server_evidence import answers, integrity
from server_work import cost, mitigation
from states import HEALTH, NOT_KNOWN, VERDICTS, Look, numbered, yes_no

UID = "flipwatch-server"


def server() -> JSON:
    """The whole board."""
    return board(
        UID,
        "Flipwatch / one server",
        "One vLLM server as its Flipwatch sidecar sees it. What is not known is grey or empty, never green.",
        {
            "Overview": _overview(),
            "Blocks": blocks(),
            "Integrity of the weights": integrity(),
            "Answers": answers(),
            "Mitigation": mitigation(),
            "Cost of monitoring": cost(),
        },
        [
            by_query(
                "vllm_instance",
                "vLLM target",
                f"label_values({of_vllm('num_requests_running')}, instance)",
                ".+",
            )
        ],
    )


def _overview() -> list[JSON]:
    return [
        stat(
            "Verdict now",
            "What all evidence together says. Unknown: the evidence does not suffice, or is too old. "
            "Sidecar away: Prometheus cannot reach it, and nothing is known. "
            "No data: no sidecar was reached in the time shown.",
            (6, 4),
            [Query(verdict_codes("job, instance"), "{{instance}}")],
            mappings=numbered(VERDICTS, AWAY),
        ),
        stat(
            "Probe and gates",
            "Whether the probe inside vLLM answers the sidecar, and whether blocks can be taken out. Without the probe "
            "all numbers about weights and gates are absent, and the scores are those of the last scan. "
            "An answering probe says nothing of the model's health.",
            (5, 4),
            [
                Query(largest("flipwatch_up"), "probe {{instance}}"),
                Query(largest("flipwatch_gates_usable"), "gates {{instance}}"),
            ],
            mappings=yes_no(Look("yes", "green"), Look("no", "red")),
        ),
        stat(
            "Flagged, changed, firing",
            "Blocks that the last scan flagged, chunks of the weights that the last sweep found changed, and alerts of "
            "the sidecar that fire. 0 holds for the time of the last scan and sweep: look at their age. "
            "No data: there was none yet, or the probe is away.",
            (6, 4),
            [
                Query(total("flipwatch_block_flagged"), "flagged blocks {{instance}}"),
                Query(total("flipwatch_weights_changed_chunks"), "changed chunks {{instance}}"),
                Query(total("flipwatch_alert_firing"), "alerts {{instance}}"),
            ],
            thresholds=BAD_ABOVE_ZERO,
        ),
        stat(
            "Age of the evidence",
            "Time since the last successful run of each monitor. No data: it never succeeded since the sidecar's state "
            "was made. Whether that is late, see below.",
            (7, 4),
            [Query(age(metric), f"{monitor} {{{{instance}}}}") for monitor, metric in LAST.items()],
            unit="s",
            decimals=0,
        ),
        timeline(
            "Verdict over time",
            "The verdict as it was. An empty stretch: Prometheus had no target there, so nothing is known; that is not "
            "a healthy stretch.",
            (24, 4),
            [Query(verdict_codes("job, instance"), "{{instance}}")],
            mappings=numbered(VERDICTS, AWAY),
        ),
        timeline(
            "Age of the evidence over its schedule",
            "Time since the last successful run over the time between two runs by the clock: orange from 3 on, where "
            "an alert of Prometheus fires. An empty row: the monitor never came to its end, or runs only by hand.",
            (24, 5),
            [Query(lateness(), "{{monitor}} {{instance}}")],
            decimals=1,
            thresholds=LATE,
        ),
        timeline(
            "Health by monitor",
            "What each monitor saw by itself. A monitor that is switched off or has not run yet is unknown. "
            "The verdict weighs them against each other, also by age.",
            (12, 7),
            [
                Query(
                    coded("flipwatch_health_state", "state", HEALTH, "job, instance, monitor"),
                    "{{monitor}} {{instance}}",
                )
            ],
            mappings=numbered(HEALTH),
        ),
        timeline(
            "Alerts",
            "Alerts of the sidecar (it sends them itself), and those that Prometheus makes of its rules. A quiet alert "
            "is grey, not green: it also is quiet when nothing is known. A rule of Prometheus has a row only while it "
            "fires.",
            (12, 7),
            [
                Query(largest("flipwatch_alert_firing", by="job, instance, alert"), "{{alert}} {{instance}}"),
                Query(
                    "max by (job, instance, alertname) "
                    '(ALERTS{alertname=~"Flipwatch.*", alertstate="firing", job=~"$job", instance=~"$instance"})',
                    "{{alertname}} (Prometheus) {{instance}}",
                ),
                Query(
                    largest("flipwatch_verdict_firing", by="job, instance, verdict"),
                    "FlipwatchVerdict: {{verdict}} {{instance}}",
                ),
            ],
            mappings=yes_no(Look("fires", "red"), Look("quiet", NOT_KNOWN)),
            values=False,
        ),
    ]
