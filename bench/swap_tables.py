"""The figures of `swap_under_load.py` as tables, and as a page."""

from typing import Any

from report import Table, page


def tables(figures: dict[str, Any]) -> list[Table]:
    """What a reader looks at."""
    runs = figures["runs"]
    return [_requests(runs), _help(runs), _steps(runs)]


def markdown(figures: dict[str, Any]) -> str:
    """The page."""
    options = figures["runs"][0]["options"]
    shortest, mean, longest = figures["runs"][0]["prompt_tokens"]
    head = [
        "# Swap under load\n",
        "Written by `bench/swap_under_load.py` (see `bench/README.md`); the figures are in `results.json`.\n",
        f"{figures['model']} ({figures['blocks']} blocks of width {figures['width']}) in {options['dtype']} on vLLM "
        f"{figures['vllm']} (CPU, eager, 2 cores that other programs used as well), a sidecar in "
        f"`enforce` beside it, {options['streams']} streams open at the same time, "
        f"prompts of {shortest} to {longest} tokens (mean {mean:.0f}), {options['tokens']} greedy tokens each. The "
        f"order goes to the sidecar's API when every stream has {options['begun']} tokens.\n",
    ]
    return page(head, tables(figures))


def _swaps(runs: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    return [(name, swap, run) for run in runs for name, swap in run["swaps"].items()]


def _requests(runs: list[dict[str, Any]]) -> Table:
    """Failed, stale."""
    rows = []
    for name, swap, run in _swaps(runs):
        count = run["options"]["streams"]
        rows.append(
            [
                name,
                f"{count}" if swap["all_open"] else f"{count}, not all open at the order",
                str(len(swap["failed"])),
                str(len(swap["stale"])),
                str(swap["across"]),
                f"{swap['off']:.1e}",
                f"{run['tolerance']:.1e}",
                f"{100 * swap['told_apart']:.1f} %",
                str(swap["from_prefix_cache"]),
            ]
        )
    for run in runs:
        again = run["again"]
        rows.append(
            [
                f"same prompts after {' and '.join(run['swaps'])}",
                *(str(run["options"]["streams"]), str(len(again["failed"]))),
                str(run["options"]["streams"] - again["same_tokens"]) + " other tokens",
                *("", f"{again['off']:.1e}", f"{run['tolerance']:.1e}", "", str(again["from_prefix_cache"])),
            ]
        )
    text = (
        "Each token is held against its log probability under the model of before and of after the swap (prompt and "
        "output as one prompt, on the idle server). A stream is stale when there is no position in front of which all "
        "are those of the first and behind which all are those of the second, within the tolerance: 3 times the "
        "largest difference in a wave without a swap, at least 1e-4 nats. "
        "`across`: streams with tokens of both models. `apart`: tokens "
        "at which the two models differ by more than the tolerance. `cached`: prompts that began in the prefix cache. "
        "The streams over an undo begin under the skip, so their first tokens also show that nothing of before the "
        "skip was left in the prefix cache."
    )
    columns = ["swap", "streams", "failed", "stale", "across", "worst difference", "tolerance", "apart", "cached"]
    return Table("Requests", text, columns, rows)


def _help(runs: list[dict[str, Any]]) -> Table:
    """From the request to the first token of the new model."""
    rows = []
    for name, swap, run in _swaps(runs):
        new = swap["first_new_seconds"]
        seconds = ["none"] * 3 if new is None else [f"{new[key]:.2f}" for key in ("first", "median", "last")]
        plain = run["plain"]
        rows.append(
            [
                *(name, *seconds, f"{swap['paused_seconds']:.2f}"),
                f"{swap['longest_stall_seconds']:.2f}",
                f"{plain['longest_stall_seconds']:.2f}",
                f"{plain['median_gap_seconds']:.2f}",
            ]
        )
    text = (
        "Seconds from the request to the sidecar until a stream got its first token of the new model, over all "
        "streams; how long the engine stood still; the longest wait of any stream between two tokens in this wave, and "
        "in the wave without a swap of the same run, with the median wait there (one step of the engine)."
    )
    columns = ["swap", "first", "median", "last", "paused", "longest stall", "without a swap", "median step"]
    return Table("Help", text, columns, rows)


def _steps(runs: list[dict[str, Any]]) -> Table:
    """Where the time goes."""
    rows = []
    for name, swap, _ in _swaps(runs):
        reached = sorted(swap["seconds"].items(), key=lambda step: step[1])
        new = swap["first_new_seconds"]
        if new is not None:
            reached = sorted([*reached, ("first new token", new["first"])], key=lambda step: step[1])
        rows.append([name, ", ".join(f"{step} {at:.2f}" for step, at in reached), swap["message"]])
    text = (
        "When each step was reached, in seconds from the request, by the sidecar's audit log. `verifying` is stored "
        "when the change is written and read back; between it and the end lies the proof by the loss, which streams do "
        "not wait for (an undo goes from `reverting` to `reverted`)."
    )
    return Table("Steps", text, ["swap", "reached", "the record says"], rows)
