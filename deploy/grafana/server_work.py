"""The board of one server: what was done, and what the watching costs."""

from board import JSON
from panels import BAD_ABOVE_ZERO, Column, Query, graph, stat, table, timeline
from promql import BLOCK, HELD, grown, in_order, increase, largest, of, rate, total
from states import GATE

_RUNS = {"scan": "scans", "sweep": "sweeps", "comparison": "differentials", "canary": "canaries"}
_FAILURES = {"scan": "scan", "sweep": "sweep", "comparison": "differential", "canary": "canary"}


def mitigation() -> list[JSON]:
    """What was done about it."""
    return [
        stat(
            "In effect now",
            "Blocks whose gate is not 1, blocks that an active mitigation of this sidecar holds, and whether a drain "
            "keeps the server out of rotation. 0 says nothing of whether one is needed. No data: the probe is away.",
            (8, 5),
            [
                Query(f"sum by (job, instance) ({of('flipwatch_block_gate')} < bool 1)", "gates below 1 {{instance}}"),
                Query(total("flipwatch_mitigation_active"), "held blocks {{instance}}"),
                Query(largest("flipwatch_drained"), "drained {{instance}}"),
            ],
            thresholds=((None, "text"), (1, "blue")),
        ),
        stat(
            "Done in the time shown",
            "Mitigations that became active and repairs that were verified, by action. Estimated from scrapes, so it "
            "may be off by one. In mode observe it stays at 0 whatever happens.",
            (8, 5),
            [Query(grown("flipwatch_mitigations_total", "instance, action"), "{{action}} {{instance}}")],
            decimals=0,
        ),
        stat(
            "Failed in the time shown",
            "Mitigations and undos that failed, or may have, by action. 0 also while none was tried.",
            (8, 5),
            [Query(grown("flipwatch_mitigation_failures_total", "instance, action"), "{{action}} {{instance}}")],
            decimals=0,
            thresholds=BAD_ABOVE_ZERO,
        ),
        timeline(
            "Gates by block",
            "Alpha of each block as served: 1 is normal, 0 is left out. An empty stretch: the probe is away, and "
            "nothing is known.",
            (24, 12),
            [Query(in_order(largest("flipwatch_block_gate", by=BLOCK)), "{{block}} {{instance}}")],
            mappings=GATE,
            thresholds=((None, "purple"),),
            values=False,
        ),
        graph(
            "Mitigations over time",
            "Done and failed, by action, around each moment. What the operator did by hand to vLLM is not here.",
            (24, 7),
            [
                Query(increase("flipwatch_mitigations_total", by="instance, action"), "{{action}} {{instance}}"),
                Query(
                    increase("flipwatch_mitigation_failures_total", by="instance, action"),
                    "{{action}} failed {{instance}}",
                ),
            ],
            bars=True,
        ),
    ]


def cost() -> list[JSON]:
    """What the watching costs, and whether it runs."""
    return [
        graph(
            "Share of time for which the engine is held",
            "In this share of the time a part of a run holds vLLM's engine, and users' requests wait. The canary holds "
            "nothing: its prompts are requests like others. 0: nothing ran, so nothing was looked at either.",
            (12, 8),
            [Query(rate(metric), f"{name} {{{{instance}}}}") for name, metric in HELD.items()],
            unit="percentunit",
            stacked=True,
        ),
        graph(
            "Duration of the last run",
            "Wall time of the last run, pauses included; of a sweep also the time spent on digests (slowest rank). "
            "The lines stay level when runs stop: look at the ages.",
            (12, 8),
            [
                Query(largest("flipwatch_scan_duration_seconds"), "scan {{instance}}"),
                Query(largest("flipwatch_sweep_duration_seconds"), "sweep {{instance}}"),
                Query(largest("flipwatch_sweep_seconds"), "sweep, digests {{instance}}"),
                Query(largest("flipwatch_differential_seconds"), "comparison {{instance}}"),
                Query(largest("flipwatch_canary_seconds"), "canary {{instance}}"),
            ],
            unit="s",
        ),
        graph(
            "Parts per second",
            "Parts of runs; vLLM serves between two of them. Many short parts cost users less than few long ones.",
            (8, 7),
            [
                Query(rate("flipwatch_scan_parts_total"), "scans {{instance}}"),
                Query(rate("flipwatch_sweep_parts_total"), "sweeps {{instance}}"),
                Query(rate("flipwatch_differential_parts_total"), "comparisons {{instance}}"),
            ],
        ),
        stat(
            "Runs started in the time shown",
            "By monitor, those by hand included. Estimated from scrapes, so it may be off by one.",
            (8, 7),
            [Query(grown(f"flipwatch_{runs}_total"), f"{name} {{{{instance}}}}") for name, runs in _RUNS.items()],
            decimals=0,
        ),
        stat(
            "Runs that failed in the time shown",
            "By monitor. 0 also when none was started.",
            (8, 7),
            [
                Query(grown(f"flipwatch_{name}_failures_total"), f"{run} {{{{instance}}}}")
                for run, name in _FAILURES.items()
            ],
            decimals=0,
            thresholds=BAD_ABOVE_ZERO,
        ),
        graph(
            "Runs that were due and did not come to their end",
            "Skipped because one was running or the time was missed, or given up for a mitigation.",
            (12, 7),
            [
                Query(
                    increase(f"flipwatch_{runs}_skipped_total", by="instance, reason"),
                    f"{name} {{{{reason}}}} {{{{instance}}}}",
                )
                for name, runs in _RUNS.items()
            ],
            bars=True,
        ),
        graph(
            "Alert messages to the webhook",
            "Accepted and not delivered, around each moment. 0 of both also when no webhook is set.",
            (6, 7),
            [
                Query(increase("flipwatch_alerts_sent_total"), "sent {{instance}}"),
                Query(increase("flipwatch_alert_failures_total"), "failed {{instance}}"),
            ],
            bars=True,
        ),
        stat(
            "Forward passes of the last scan",
            "What the last scan cost, in passes over the validation set.",
            (6, 7),
            [Query(largest("flipwatch_scan_passes"), "{{instance}}")],
            decimals=1,
        ),
        table(
            "Versions",
            "The sidecar, the model that it sees, and the clean profile that is kept. A model is absent while the "
            "probe is away, a profile while there is none. Always 1 by itself: the labels are what counts.",
            (24, 5),
            [
                Column(largest("flipwatch_build_info", by="job, instance, version, python_version"), "1", shown=False),
                Column(
                    largest(
                        "flipwatch_model_info", by="job, instance, model_name, architecture, mode, dtype, vllm_version"
                    ),
                    "2",
                    shown=False,
                ),
                Column(largest("flipwatch_profile_info", by="job, instance, model_digest, engine"), "3", shown=False),
            ],
            labels=["instance", "version", "model_name", "architecture", "mode", "dtype", "vllm_version"],
            hidden=["job"],
            sort="instance",
            descending=False,
        ),
    ]
