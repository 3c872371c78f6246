"""The figures of the differential benchmark as tables, for the terminal and as Markdown."""

import statistics
from typing import Any

from differential_cost_tables import compared_healthy, compared_rounded, memory, three_digits, times
from report import Table, page, share

_SAYS = {
    "exact": "exactly this block",
    "sublayer": "sublayer",
    "module": "module",
    "tensor": "tensor, part, first element, number of elements",
}
_NAMES = {"recorded": "recorded states", "checkpoint": "checkpoint", "other kernels": "recorded, other kernels allowed"}


def tables(figures: dict[str, Any]) -> list[Table]:
    """All that was measured."""
    return [
        _located(figures),
        _by(figures, "by_kind", "fault"),
        _by(figures, "by_what", "tensor"),
        _comparisons(figures),
        _triples(figures["triples"]),
        _healthy(figures["healthy"]),
        _factors(figures),
        memory(figures["memory"]),
        times(figures["times"]),
        compared_healthy(figures["compare"]["healthy"]),
        compared_rounded(figures["compare"]["rounded"]),
    ]


def _located(figures: dict[str, Any]) -> Table:
    faults = figures["faults"]
    rows = []
    for name, reference in faults["references"].items():
        right = [
            share(reference["more_than_noise"][level]) if level in reference["more_than_noise"] else ""
            for level in _SAYS
        ]
        rows.append([_NAMES[name], *right, _of(reference["within_noise"]), _unchanged(reference)])
    first, last = faults["in_first_and_last"]
    text = (
        f"{faults['faults']} faults of {len(faults['kinds'])} kinds in {len(faults['whats'])} tensors of "
        f"{faults['blocks_hit']} of {figures['blocks']} blocks ({first} in the first, {last} in the last), drawn with "
        f"seed {figures['options']['seed']} so that all come equally often, with 1, 4, 18 or 256 values; those that "
        "change no bit are drawn again. The truth is taken from memory: which bits changed, and what the block then "
        "makes of the same input, all of its activations and not their sketches. Counted in the first columns are the "
        "faults that change the block's output by more than the noise that was measured (running it again; here "
        "nothing); in the last two the others: changed, but within the noise, and not changed in any bit, with the "
        "health of the whole finding, which looks at more tokens where there is a walk. In brackets: "
        "count, and 95 % interval (Wilson). *Exactly this block* means that no other is named. Recorded states know no "
        "tensors: there the module is named that departs first, which tells `qkv_proj` but not which of q, k and v. "
        f"After each fault the tensor was put back bit for bit: {_of(faults['put_back'])}. The third row judges the "
        "replays of the first as if other kernels had recorded, so that what rounding explains is allowed."
    )
    columns = ["reference", *_SAYS.values(), "found within noise", "found of unchanged"]
    return Table("Single faults: located", text, columns, rows)


def _by(figures: dict[str, Any], key: str, head: str) -> Table:
    references = figures["faults"]["references"]
    names = list(references["recorded"][key])
    rows = []
    for name in names:
        counts = [references["recorded"][key][name][level] for level in ("exact", "sublayer", "module")]
        counts += [references["checkpoint"][key][name][level] for level in ("exact", "tensor")]
        counts += [references["other kernels"][key][name]["exact"]]
        rows.append([name, *(_of(count) for count in counts)])
    columns = [
        head,
        "recorded: block",
        "sublayer",
        "module",
        "checkpoint: block",
        "tensor and element",
        "other kernels allowed: block",
    ]
    text = "Of the faults that change the block's output by more than the noise."
    return Table(f"The same by {head}", text, columns, rows)


def _comparisons(figures: dict[str, Any]) -> Table:
    faults = figures["faults"]
    rows = []
    for name in ("recorded", "checkpoint"):
        made = faults["references"][name]["comparisons"]
        used = made["sorted"]
        within = [sum(one <= faults["limits"][limit] for one in used) for limit in ("children", "two")]
        rows.append(
            [
                _NAMES[name],
                str(made["located"]),
                f"{statistics.median(used):g}" if used else "",
                str(made["most"]),
                *(f"{count} of {len(used)}" for count in within),
            ]
        )
    limits = faults["limits"]
    effort = next(iter(faults["references"]["checkpoint"]["effort"]), {"digests": 0, "tensors": 0, "brute_force": 0})
    text = (
        f"One comparison for each of the {figures['blocks']} blocks, then those of the modules inside the block, then "
        f"one of the tensor. A block has {figures['children']} children. With the checkpoint, digests take the place "
        f"of comparisons inside the block: {effort['digests']} pairs of digests and {effort['tensors']} tensor value "
        f"by value, where brute force compares {effort['brute_force']} tensors."
    )
    columns = [
        "reference",
        "located",
        "median",
        "most",
        f"at most blocks + children + 1 = {limits['children']}",
        f"at most blocks + 2 + 1 = {limits['two']}",
    ]
    return Table("Comparisons per located fault", text, columns, rows)


def _triples(triples: dict[str, Any]) -> Table:
    rows = [
        [
            _NAMES[name],
            share(reference["exact"]),
            *(share(reference["each"][level]) if level in reference["each"] else "" for level in list(_SAYS)[1:]),
        ]
        for name, reference in triples["references"].items()
    ]
    text = (
        f"{triples['triples']} times three faults in three blocks at once, in {triples['not_finite']} of them one of "
        "NaN or Inf; each changes what its block hands on. One measurement; *exactly these* means all three blocks and "
        f"no other. Put back bit for bit: {_of(triples['put_back'])}."
    )
    return Table("Three faults at once", text, ["reference", "exactly these blocks", *list(_SAYS.values())[1:]], rows)


def _healthy(healthy: dict[str, Any]) -> Table:
    rows = [
        [
            pair,
            ", ".join(f"{health} {count}" for health, count in one["health"].items()),
            *(three_digits(one["l2"][at]) for at in ("block", "module", "walk")),
            *(three_digits(one["over_allowed"][at]) for at in ("block", "module", "walk")),
            three_digits(one["nats_apart"]),
        ]
        for pair, one in healthy["pairs"].items()
    ]
    factors, needed = healthy["factors"], healthy["needed_rounding_factor"]
    text = (
        f"{healthy['judgements']} judgements of healthy models, {healthy['not_ok']} of them not `ok`. Recorded by the "
        "first, replayed by the second; each set of sequences with another seed of the projections. Given are the "
        "largest distance of all sets, and the largest over the allowed one (an alarm is above 1), for the outputs of "
        "the blocks, of the modules inside them, and for the walk as served. Equal kernels are allowed "
        f"{factors['repeated']:g} times the noise of repetition, others {factors['rounding']:g} times that of "
        "rounding; the smallest factor without an alarm would have been "
        f"{three_digits(needed['block'])} for blocks, {three_digits(needed['module'])} for modules and "
        f"{three_digits(needed['walk'])} for the walk. Threads: "
        f"{', '.join(f'{name} {count}' for name, count in healthy['threads'].items())}."
    )
    columns = [
        "recorded -> replayed",
        "health",
        *(f"largest l2, {at}" for at in ("block", "module", "walk")),
        *(f"over allowed, {at}" for at in ("block", "module", "walk")),
        "losses apart, nats",
    ]
    return Table("Healthy models", text, columns, rows)


def _factors(figures: dict[str, Any]) -> Table:
    rows = [[factor, share(count)] for factor, count in figures["by_factor"].items()]
    text = (
        "With other kernels a block is allowed a multiple of its noise of rounding. Of the single faults above, those "
        "that change the output of their block, so many would be seen at each multiple."
    )
    return Table("What a larger allowance costs", text, ["times the noise of rounding", "faults seen"], rows)


def _unchanged(reference: dict[str, Any]) -> str:
    told = ", ".join(f"{health} {count}" for health, count in reference["unchanged_health"].items())
    return f"{_of(reference['unchanged'])} ({told})" if told else _of(reference["unchanged"])


def _of(count: list[int]) -> str:
    return f"{count[0]} of {count[1]}"


def markdown(figures: dict[str, Any]) -> str:
    """The page for the documentation."""
    head = [
        "# Differential: faults located against a clean model\n",
        "Made by `bench/differential.py` (see `bench/README.md` for the commands); do not edit by hand. All of it was "
        f"run on a CPU, with {figures['model']} in vLLM {figures['vllm']} (bf16, eager, plain weights, one thread) and "
        f"in transformers {figures['transformers']}, torch {figures['torch']}; nothing was run on a GPU. The figures "
        "are in `results.json`.\n",
    ]
    return page(head, tables(figures))
