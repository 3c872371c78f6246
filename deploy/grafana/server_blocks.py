"""The board of one server, block by block."""

from board import JSON
from panels import OVER_LIMIT, Column, Query, graph, matrix, stat, table, timeline
from promql import BLOCK, REFERENCE, SCORE, in_order, largest, over_tau
from states import GATE, Look, yes_no

from flipwatch.monitors.alpha_scan import QUICK_GRID


def blocks() -> list[JSON]:
    """What scans and comparisons say of each block."""
    losses = largest("flipwatch_block_loss_nats", by="instance, block, alpha")
    l2 = largest("flipwatch_block_divergence", 'measure="l2"', by=BLOCK)
    return [
        timeline(
            "z over tau by block",
            "Robust z of the chosen score over its threshold tau, block by block: orange from tau on, yellow from half "
            "of it. A large z alone flags nothing, and a small one does not clear a block: the two rules of the "
            "scan are in the table. An empty stretch: not measured, or not finite. Against the profile: only with a "
            "clean profile.",
            (24, 16),
            [Query(in_order(over_tau(BLOCK)), "{{block}} {{instance}}")],
            decimals=2,
            thresholds=OVER_LIMIT,
            values=False,
        ),
        graph(
            "Largest z and tau",
            "The five blocks with the largest z of the chosen score, and tau. Lines stay level between two scans: "
            "they are the last scan's.",
            (12, 8),
            [
                Query(
                    f"topk by (job, instance) (5, {largest('flipwatch_block_zscore', SCORE, REFERENCE, by=BLOCK)})",
                    "block {{block}} {{instance}}",
                ),
                Query(largest("flipwatch_threshold", SCORE), "tau {{instance}}"),
            ],
            dashed=["/^tau/"],
        ),
        graph(
            "Largest skip gain in standard errors",
            "How sure the scan is that the model is better without a block: the five largest, and the threshold of "
            "rule harm. Absent where a loss is not finite or there are too few sequences.",
            (12, 8),
            [
                Query(
                    f"topk by (job, instance) (5, {largest('flipwatch_block_skip_gain_t', by=BLOCK)})",
                    "block {{block}} {{instance}}",
                ),
                Query(largest("flipwatch_skip_gain_t_threshold"), "threshold {{instance}}"),
            ],
            dashed=["/^threshold/"],
        ),
        table(
            "Blocks, worst first",
            "The last scan and the last comparison by block, and alpha as served. Rule harm flags a block whose skip "
            "gain and t both pass their thresholds; rule drift one without which the loss is as in the clean profile. "
            "No data: not measured, not finite, or without a profile.",
            (24, 12),
            [
                Column(
                    in_order(largest("flipwatch_block_flagged", by=BLOCK)),
                    "flagged",
                    mappings=yes_no(Look("flagged", "red"), Look("no", "text")),
                ),
                Column(in_order(over_tau(BLOCK)), "z over tau", decimals=2, thresholds=OVER_LIMIT),
                Column(
                    in_order(largest("flipwatch_block_score", 'score="skip_gain"', by=BLOCK)),
                    "skip gain, nats",
                    decimals=3,
                ),
                Column(in_order(largest("flipwatch_block_skip_gain_t", by=BLOCK)), "skip gain, t", decimals=1),
                Column(
                    in_order(largest("flipwatch_block_loss_without_nats", by=BLOCK)),
                    "loss without it, nats",
                    decimals=3,
                ),
                Column(
                    in_order(largest("flipwatch_block_without_drift_nats", by=BLOCK)),
                    "the same over the profile's, nats",
                    decimals=3,
                ),
                Column(
                    in_order(largest("flipwatch_block_departs", by=BLOCK)),
                    "departs",
                    mappings=yes_no(Look("departs", "red"), Look("no", "text")),
                ),
                Column(in_order(largest("flipwatch_block_gate", by=BLOCK)), "gate", decimals=2, mappings=GATE),
            ],
            labels=["instance", "block"],
            hidden=["job"],
            sort="skip gain, t",
        ),
        matrix(
            "Loss by alpha, nats per token",
            "Loss on the validation set with a block scaled by alpha (columns) and all others as served, from the last "
            "scan. 0 leaves the block out. A block whose loss falls towards 0 does harm. Compare with the loss as "
            "served. Absent: not measured, or not finite.",
            (12, 12),
            f'label_join({in_order(losses)}, "row", " block ", "instance", "block")',
            rows="server and block",
            columns="alpha",
            values=[f"{alpha:g}" for alpha in QUICK_GRID],
        ),
        graph(
            "Loss as served and drift, nats per token",
            "Loss on the validation set as served, and how far it lies above its healthy value. The line ends where "
            "the loss is not finite: then the next panel says no. Drift is absent without a clean profile.",
            (12, 8),
            [
                Query(largest("flipwatch_base_loss_nats"), "loss {{instance}}"),
                Query(largest("flipwatch_drift_nats"), "drift {{instance}}"),
                Query(largest("flipwatch_drift_threshold_nats"), "drift threshold {{instance}}"),
            ],
            dashed=["/^drift threshold/"],
        ),
        stat(
            "Last scan",
            "Whether the loss was a finite number, whether a clean profile was used, and drift in standard errors. "
            "Without a profile a damage that harms every block alike is not seen by rule drift.",
            (12, 4),
            [
                Query(largest("flipwatch_base_loss_finite"), "loss is finite {{instance}}"),
                Query(largest("flipwatch_profile_used"), "with a profile {{instance}}"),
            ],
            mappings=yes_no(Look("yes", "text"), Look("no", "orange")),
        ),
        timeline(
            "Divergence over what is allowed, by block",
            "Relative L2 distance of a block's output, run alone on the same input, from its reference's, over the "
            "distance that is rounding: above 1 the block computes something else. An empty stretch: not compared, not "
            "finite, or nothing known to compare with.",
            (24, 12),
            [
                Query(
                    in_order(f"{l2} / on ({BLOCK}) {largest('flipwatch_block_divergence_allowed', by=BLOCK)}"),
                    "{{block}} {{instance}}",
                )
            ],
            decimals=2,
            thresholds=OVER_LIMIT,
            values=False,
        ),
        graph(
            "Largest divergence behind a block, as served",
            "Relative L2 distance of the stream behind a block with what the blocks in front of it hand on: the five "
            "largest. The first block where it jumps is the place to look at; later ones inherit.",
            (24, 8),
            [
                Query(
                    f"topk by (job, instance) (5, {largest('flipwatch_walk_divergence', by=BLOCK)})",
                    "block {{block}} {{instance}}",
                )
            ],
        ),
    ]
