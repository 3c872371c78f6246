"""What a differential measurement costs, and builds compared: the tables of it."""

from typing import Any

from report import Table, spread


def memory(figures: dict[str, Any]) -> Table:
    """Peaks, beside what they are held against."""
    block = figures["block_bytes"]
    rows = [
        [what, f"{count / 1e6:.2f}", f"{count / block:.2f}"]
        for what, count in (
            ("tensors of the largest block", block),
            ("its largest tensor in the file", figures["largest_stored_bytes"]),
            ("what its modules hand on, once", figures["activation_bytes"]),
            ("signs of the projections", figures["signs_bytes"]),
            ("peak: clean tensors made", figures["clean_peak_bytes"]),
            ("peak: sketches of all modules", figures["sketching_peak_bytes"]),
            ("peak: checkpoint measurement", figures["checkpoint_peak_bytes"]["without noise"]),
            ("peak: the same with noise", figures["checkpoint_peak_bytes"]["with noise"]),
            ("peak: replay of recorded states", figures["replay_peak_bytes"]),
            ("growth of a fresh process: checkpoint measurement", figures["resident"]["checkpoint"]),
            ("the same: the live blocks run on as many tokens", figures["resident"]["live"]),
        )
    ]
    text = (
        "Peaks are of all memory that torch had allocated at once beside the model, by its profiler, scratch of the "
        "kernels too. The clean tensors of a block are made on the CPU, where one tensor of the file at a time lies "
        "beside them while they are loaded; on another device only the finished ones arrive. The last two rows are "
        "what the operating system says of a process of its own whose allocator gives large pieces back at once: the "
        "most that became resident, with all that is not torch's, also when only the live blocks are run."
    )
    return Table("Extra memory of the checkpoint reference", text, ["what", "MB", "blocks"], rows)


def times(figures: dict[str, Any]) -> Table:
    """Seconds and ratios."""
    rows = [
        [
            name,
            spread(seconds, 3),
            spread(figures["over_pass"][name]) if name in figures["over_pass"] else "1",
            str(len(seconds)),
        ]
        for name, seconds in figures["seconds"].items()
    ]
    text = (
        f"{figures['sequences']} sequences of {figures['tokens']} tokens, blocks alone on {figures['prefix']} tokens, "
        f"on {figures['threads']} thread; median, smallest and largest, the ratio within one repeat, in alternating "
        f"order. Recording and checkpoint measure the noise too. A recording is {figures['recording_bytes'] / 1e6:.2f} "
        f"MB of JSON, of which the inputs of the blocks are {figures['inputs_bytes'] / 1e6:.2f} MB."
    )
    return Table("Time, and bytes of a recording", text, ["what", "seconds", "over one pass", "n"], rows)


def compared_healthy(healthy: dict[str, Any]) -> Table:
    """Two precisions."""
    rows = [
        [
            pair,
            one["health"],
            *(three_digits(one[at][key]) for at in ("block", "walk") for key in ("l2", "over_allowed")),
        ]
        for pair, one in healthy.items()
    ]
    columns = ["pair", "health", "largest l2, block", "over allowed", "largest l2, walk", "over allowed"]
    text = "Two builds of the same checkpoint by transformers, as `flipwatch compare` holds them against each other."
    return Table("Compared: precision", text, columns, rows)


def compared_rounded(rounded: list[dict[str, Any]]) -> Table:
    """Rounded builds."""
    rows = [
        [
            str(one["block"]),
            one["reference"],
            str(one["rank"]),
            ", ".join(map(str, one["flagged"])) or "none",
            one["health"],
            three_digits(one["l2"]),
            three_digits(one["allowed"]),
            three_digits(one["second"]),
            three_digits(None if one["nats"] is None else one["nats"] - one["reference_nats"]),
        ]
        for one in rounded
    ]
    columns = [
        "rounded",
        "against",
        "rank",
        "flagged",
        "health",
        "l2",
        "allowed",
        "next block, over allowed",
        "nats more",
    ]
    text = (
        "The bf16 model with the matrices of one block rounded to int8 (each row symmetric, 255 steps), against itself "
        "in bf16 and against the fp32 model. The rank is that of the rounded block among all."
    )
    return Table("Compared: one block rounded to int8", text, columns, rows)


def three_digits(value: float | None) -> str:
    """Three digits."""
    return "none" if value is None else f"{value:.3g}"
