"""The figures of the integrity benchmark as tables, for the terminal and as Markdown."""

from collections.abc import Sequence
from typing import Any

from report import Table, page, share, spread


def milliseconds(seconds: Sequence[float]) -> str:
    """The same in milliseconds."""
    return spread([1000 * value for value in seconds], 1)


def tables(figures: dict[str, Any]) -> list[Table]:
    """All that was measured."""
    made = [_detection(figures), _alarms(figures), _speed(figures), _repair(figures), _kinds(figures)]
    if figures["live"] is not None:
        made.append(_live(figures["live"]))
    return made


def _detection(figures: dict[str, Any]) -> Table:
    flips = figures["flips"]
    groups = ["all", "uniform over bytes", "uniform over tensors", "in buffers and attributes"]
    rows = []
    named = flips["named"]
    rows.append(["fingerprint: named", *(share(named.get(group, (0, 0))) for group in groups), ""])
    for name, detector in figures["detectors"].items():
        counts = detector["seen"]
        shares = [share(counts.get(group, (0, 0))) for group in groups]
        rows.append([name, *shares, f"{detector['reference_bytes']}"])
    recording = figures["recording"]
    text = (
        f"{flips['flips']} single bits, drawn with seed {figures['seed']}: uniform over the covered bytes, and "
        f"{100 * figures['share_by_tensor']:.0f} % uniform over the tensors, so that small ones and buffers are hit "
        f"too ({flips['tensors_hit']} of {recording['tensors']} tensors and {flips['chunks_hit']} of "
        f"{recording['chunks']} chunks were hit). Each is flipped in place, looked for, and flipped back. *Named* "
        "means that the sweep says the tensor, chunk, element and bit, and nothing else. The other detectors looked at "
        "the first flips of the same list, as many as their rows say, since their checks take longer. In brackets: "
        "count, and 95 % interval (Wilson). vLLM hashes its "
        f"{figures['detectors'][_SHA]['reference_bytes'] // 32} parameters only, so it cannot see buffers (rotary "
        "tables, scales of keys and values). The rows of LM-Fix are a rebuild from its description. After all flips "
        "every byte was " + ("that of before." if flips["intact_afterwards"] else "NOT that of before.")
    )
    columns = ["detector", *groups, "reference, bytes"]
    return Table("Single flipped bits: seen", text, columns, rows)


def _alarms(figures: dict[str, Any]) -> Table:
    healthy = figures["healthy"]
    rows = [
        ["fingerprint, engine idle", share(healthy["idle"])],
        ["fingerprint, between engine steps while it serves", share(healthy["serving"])],
    ]
    if (live := figures["live"]) is not None:
        rows.append(["fingerprint, over HTTP on a server under load", share((live["alarms"], live["sweeps"]))])
    rows += [[name, share(count)] for name, count in healthy["peers"].items()]
    text = (
        "Checks of the healthy model that said it had changed. While it served in this process, "
        f"{healthy['served_tokens']} tokens for random prompts were made between the parts of the sweeps."
    )
    return Table("Healthy: false alarms", text, ["detector", "alarms"], rows)


def _speed(figures: dict[str, Any]) -> Table:
    speed = figures["speed"]
    rows = [
        [
            name,
            milliseconds(seconds),
            milliseconds(speed["cpu_seconds"][name]),
            spread(speed["over_sweep"].get(name, []), 2) if name in speed["over_sweep"] else "",
            spread(speed["cpu_over_sweep"].get(name, []), 2) if name in speed["cpu_over_sweep"] else "",
            str(len(seconds)),
        ]
        for name, seconds in speed["seconds"].items()
    ]
    slower = [1 / ratio for ratio in speed["over_sweep"]["tensor.sum()"]]
    text = (
        f"One check of {speed['bytes'] / 1e6:.1f} MB on {speed['threads']} thread ({speed['machine']}, torch "
        f"{speed['torch']}), in turn and in alternating order; median, smallest and largest. The ratio is this check "
        "over the sweep, within one repeat; CPU time is that of the process. A sweep takes "
        f"{spread(slower)} times as long as `tensor.sum()` of every tensor in its own dtype (wanted: at most 2), and "
        f"vLLM's SHA-256 {spread(speed['over_sweep'][_SHA])} times as long as a sweep (wanted: at least 4)."
    )
    columns = ["check", "ms", "CPU ms", "over sweep", "over sweep, CPU", "n"]
    return Table("Speed", text, columns, rows)


def _repair(figures: dict[str, Any]) -> Table:
    repair, recording = figures["repair"], figures["recording"]
    parity = repair["parity_seconds"]
    rows = [
        ["baseline: digests and parity", milliseconds(recording["seconds"]), str(len(recording["seconds"]))],
        ["one chunk by parity", milliseconds(parity), str(len(parity))],
        [
            "one chunk from the checkpoint",
            milliseconds(repair["checkpoint_seconds"]),
            str(len(repair["checkpoint_seconds"])),
        ],
        ["vLLM's `reload_weights`", milliseconds(repair["reload_seconds"]), str(len(repair["reload_seconds"]))],
    ]
    checkpoint = len(repair["checkpoint_seconds"]) + repair["checkpoint_refused"]
    text = (
        f"{recording['chunks']} chunks of {recording['chunk_bytes'] / 2**20:g} MiB. Parity takes "
        f"{recording['parity_bytes'] / 1e6:.1f} MB, "
        f"{100 * recording['parity_bytes'] / recording['covered_bytes']:.2f} % of the weights. The time of a repair "
        "holds the looks before and after, and the diagnosis. From the checkpoint: a second chunk of the group was "
        f"changed too, so that parity gave nothing ({repair['checkpoint_refused']} of {checkpoint} refused: tensors "
        "that no checkpoint has). The reload is that of the whole model, with the files in the page cache; after it "
        f"{repair['reload_changed_chunks']} chunks had other bytes, and {repair['reload_replaced_tensors']} tensors "
        f"had been replaced by others. It takes {repair['reload_over_parity']:.1f} times as long as a repair by parity "
        "(medians; wanted: at least 100)."
    )
    return Table("Baseline, repair, reload", text, ["what", "ms", "n"], rows)


def _kinds(figures: dict[str, Any]) -> Table:
    faults = figures["faults"]
    rows = [
        [kind, str(count["faults"]), str(count["seen"]), str(count["by_parity"]), str(count["same_bits"])]
        for kind, count in faults["kinds"].items()
    ]
    pairs = faults["pairs"]
    rows.append(
        [
            "two chunks of one group",
            str(pairs["pairs"]),
            str(pairs["seen"]),
            f"checkpoint: {pairs['by_checkpoint']}",
            str(pairs["same_bits"]),
        ]
    )
    text = (
        "Each kind of the fault library on random tensors, with 1, 4, 18 or 256 values, drawn until the fault lies in "
        "one chunk; a pair has a fault of each kind in turn in one chunk, and flips in another one of its group. "
        "*Seen*: the sweep names this chunk (these two), and no other. *Same bits*: all weights equal a copy from "
        f"before the fault. Of the pairs {pairs['refused']} were refused, and in {pairs['refused_left_as_found']} of "
        "these the memory was left as it was found."
    )
    return Table("Fault kinds: repaired", text, ["fault", "n", "seen", "repaired by parity", "same bits"], rows)


def _live(live: dict[str, Any]) -> Table:
    trials = live["trials"]
    rows = [
        ["sweep, healthy", milliseconds(live["sweep_seconds"]), str(live["sweeps"])],
        *(
            [label, milliseconds([trial[key] for trial in trials]), str(len(trials))]
            for label, key in (
                ("sweep that finds the fault", "sweep_seconds"),
                ("from detection to the end of the repair", "detection_to_repair_seconds"),
                ("of this, nothing is computed", "paused_seconds"),
                ("from detection to the first clean token", "detection_to_token_seconds"),
            )
        ),
    ]
    failed = len(live["failed_requests"]) + sum(len(trial["failed_requests"]) for trial in trials)
    text = (
        f"A vLLM server of its own on {live['threads']} CPUs, with {live['clients']} clients that stream all the time; "
        "everything over HTTP. Bit 14 of one value of a down projection flips; it changed the greedy output in "
        f"{live['faults_that_changed_the_output']} of {len(trials)} trials. The first clean token is the next one of a "
        "request that was in flight when the fault was found: it is computed anew with the repaired weights. Repaired: "
        f"{sum(trial['repaired'] for trial in trials)} of {len(trials)}; greedy output afterwards equal to that of "
        f"before the faults: {live['outputs_same_after_repair']} of {len(trials)}; failed requests: {failed}."
    )
    return Table("On a live server", text, ["what", "ms", "n"], rows)


_SHA = "vLLM's SHA-256"


def markdown(figures: dict[str, Any]) -> str:
    """The page for the documentation."""
    head = [
        "# Integrity: changed bits are seen, named and put back\n",
        "Made by `bench/integrity.py` (see `bench/README.md` for the commands); do not edit by hand. All of it was run "
        f"on a CPU, with {figures['model']} in vLLM {figures['vllm']}, bf16, eager, plain weights, in one process on "
        "one thread; nothing was run on a GPU. The figures are in `results.json`.\n",
    ]
    return page(head, tables(figures))
