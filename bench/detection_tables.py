"""Tables of faults in one block: by score, kind and position, and what cheaper scans make of them."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from detection import BUCKETS, damage_class
from detection_judge import SCORES, Results, Verdict

from flipwatch.monitors.alpha_scan import AlphaScan, AlphaScanPlan, AlphaScanReading, Strategy
from flipwatch.monitors.alpha_scan.rounds import GROUP

CLASSES = (f"below {BUCKETS[0]} nats", f"{BUCKETS[0]} to {BUCKETS[1]}", f"{BUCKETS[1]} and more")
Row = list[str]
Chapter = tuple[dict[str, Any], list[str]]
"""Figures for the JSON, and lines of Markdown."""


def by_score(singles: list[Verdict], skippable: list[int]) -> Chapter:
    """Rank 1 and detection of each score, by damage, and for skippable blocks."""
    groups: list[tuple[str, Callable[[Verdict], bool]]] = [
        (CLASSES[number], lambda v, n=number: v.complete and damage_class(v.healthy, v.loss) == n)
        for number in range(3)
    ]
    groups += [
        (f"{CLASSES[2]}, skippable block", lambda v: v.complete and _is_bad(v, skippable)),
        ("not finite or exploding", lambda v: not v.complete),
        (f"all of {CLASSES[2]} in a skippable block", lambda v: _is_bad(v, skippable)),
    ]
    figures: dict[str, Any] = {}
    rows_rank, rows_detected = [], []
    members = {name: [v for v in singles if test(v)] for name, test in groups}
    for score in SCORES:
        ranked = {name: sum(v.first(score) in v.case.blocks for v in some) for name, some in members.items()}
        found = {name: sum(v.detects(score) for v in some) for name, some in members.items()}
        figures[score.name] = {"rank_1": ranked, "detected": found}
        rows_rank.append([score.name, *(share(ranked[name], len(some)) for name, some in members.items())])
        if math.isfinite(score.threshold):
            rows_detected.append([score.name, *(share(found[name], len(some)) for name, some in members.items())])
    drifted = {name: sum(drifts(v) for v in some) for name, some in members.items()}
    figures["drift"] = {"detected": drifted}
    rows_detected.append(["drift, profile", *(share(drifted[name], len(some)) for name, some in members.items())])
    flagged = {name: sum(set(v.case.blocks) <= set(v.finding.flagged) for v in some) for name, some in members.items()}
    others = {
        name: sum(bool(set(v.finding.flagged) - set(v.case.blocks)) for v in some) for name, some in members.items()
    }
    figures["flagged"], figures["others_flagged"] = flagged, others
    figures["members"] = {name: len(some) for name, some in members.items()}
    heading = ["", *(f"{name} ({len(some)})" for name, some in members.items())]
    last = [v.recovered for v in members[groups[-1][0]] if v.complete]
    recovered = [share for share in last if share is not None]
    figures["recovered_median"] = statistics.median(recovered) if recovered else None
    figures["recovered"] = recovered
    lines = [
        "### Faults in one block\n",
        "Faults that make a block's output not finite, or explode, are named by the first pass, and the model with "
        "them has no curves: only the rule harm can say anything there.\n",
        "The damaged block is ranked first by:\n",
        table(heading, rows_rank),
        "The model is called damaged by:\n",
        table(heading, rows_detected),
        "The finding (rule harm, all rounds):\n",
        table(
            heading,
            [
                ["flags the damaged block", *(share(flagged[name], len(some)) for name, some in members.items())],
                ["flags another block", *(share(others[name], len(some)) for name, some in members.items())],
            ],
        ),
    ]
    if recovered:
        lines.append(
            f"Recovered share of the lost loss, flagged blocks left out, faults of {CLASSES[2]} nats in skippable "
            f"blocks, explosions not counted: median {statistics.median(recovered):.2f}, {min(recovered):.2f} to "
            f"{max(recovered):.2f}, {len(recovered)} faults.\n"
        )
    return figures, lines


def by_kind(results: Results, singles: list[Verdict], skippable: list[int]) -> Chapter:
    """Damage and detection of each kind of fault."""
    drawn = results.drawn("single/")
    figures: dict[str, Any] = {}
    rows: list[Row] = []
    for kind in dict.fromkeys(case.kind for case, _, _ in drawn):
        classes = [damage_class(healthy, loss) for case, loss, healthy in drawn if case.kind == kind]
        counts = [classes.count(number) for number in range(3)]
        cells, told = [], {}
        for number in range(3):
            some = [v for v in singles if v.case.kind == kind and damage_class(v.healthy, v.loss) == number]
            hit = sum(set(v.case.blocks) <= set(v.finding.flagged) for v in some)
            told[CLASSES[number]] = {"scanned": len(some), "flagged": hit, "drift": sum(drifts(v) for v in some)}
            cells.append(share(hit, len(some)))
        able = [v for v in singles if v.case.kind == kind and _is_bad(v, skippable)]
        hit = sum(set(v.case.blocks) <= set(v.finding.flagged) for v in able)
        figures[kind] = {"drawn": counts, "by_damage": told, "skippable": {"scanned": len(able), "flagged": hit}}
        rows.append([kind, " / ".join(map(str, counts)), *cells, share(hit, len(able))])
    heading = ["Kind", "drawn, by damage", *(f"flagged, {name}" for name in CLASSES), "skippable, " + CLASSES[2]]
    return figures, ["### By kind of fault\n", table(heading, rows)]


def by_position(singles: list[Verdict], skippable: list[int], blocks: int) -> Chapter:
    """Detection by where in the model the block is, for faults above the middle border."""
    figures: dict[str, Any] = {}
    rows = []
    thirds = ("first third", "middle third", "last third")
    places = [(name, [b for b in range(blocks) if 3 * b // blocks == n]) for n, name in enumerate(thirds)]
    places.append(("block 0", [0]))
    places.append(("not skippable", [b for b in range(blocks) if b not in skippable]))
    for name, where in places:
        some = [v for v in singles if set(v.case.blocks) <= set(where) and damage_class(v.healthy, v.loss) == 2]
        hit = sum(set(v.case.blocks) <= set(v.finding.flagged) for v in some)
        drift = sum(drifts(v) for v in some)
        figures[name] = {"faults": len(some), "flagged": hit, "drift": drift}
        rows.append([name, str(len(some)), share(hit, len(some)), share(drift, len(some))])
    lines = [
        f"### By position, faults of {CLASSES[2]} nats\n",
        table(["", "faults", "block flagged", "drift seen (profile)"], rows),
    ]
    return figures, lines


def cheaper(singles: list[Verdict], order: AlphaScanPlan) -> Chapter:
    """Would the cheaper strategies have flagged the same block?  Only faults that the first round flags can say."""
    firsts = [(v, AlphaScan().judge(v.readings[:1]).flagged) for v in singles if v.complete and v.loss is not None]
    if not firsts:
        return {}, []
    grouped = [(_grouped_flag(v.readings[0], v.groups, order), blocks) for v, blocks in firsts if v.groups is not None]
    of_flagged = [pair for pair in grouped if pair[1]]
    flagged = [(v, blocks) for v, blocks in firsts if blocks]
    figures = {
        "grouped": {
            "cases": len(of_flagged),
            "same": sum(mine == blocks for mine, blocks in of_flagged),
            "all": len(grouped),
            "same_all": sum(mine == blocks for mine, blocks in grouped),
        },
        "slopes": {"cases": len(flagged), "same": sum(blocks[0] in _steepest(v) for v, blocks in flagged)},
    }
    titles = {"grouped": f"groups of {GROUP} first", "slopes": "a quarter of the blocks, by slope, first"}
    rows = [[titles[name], share(figure["same"], figure["cases"])] for name, figure in figures.items()]
    lines = [
        "### Cheaper scans, among faults that the quick scan flags\n",
        table(["Strategy", "same block flagged"], rows),
    ]
    return figures, lines


def _grouped_flag(served: AlphaScanReading, groups: AlphaScanReading, order: AlphaScanPlan) -> tuple[int, ...]:
    """What the strategy `grouped` flags: its second stage measures losses that the plain scan has measured too."""
    scan = AlphaScan(strategy=Strategy.GROUPED)
    second = scan.next_plan(order, [groups])
    inside = range(len(served.nats)) if second is None or second.blocks is None else second.blocks
    part = served.model_copy(update={"nats": [rows if b in inside else [] for b, rows in enumerate(served.nats)]})
    return scan.judge([part]).flagged


def _steepest(verdict: Verdict) -> set[int]:
    """The quarter of the blocks with the largest slope, up or down."""
    slopes = [(abs(s.slope), s.block) for s in verdict.finding.blocks if s.slope is not None]
    return {block for _, block in sorted(slopes, reverse=True)[: max(1, len(verdict.finding.blocks) // 4)]}


def _is_bad(verdict: Verdict, skippable: list[int]) -> bool:
    """At least the upper border of damage, in a block that can be left out."""
    return damage_class(verdict.healthy, verdict.loss) == 2 and set(verdict.case.blocks) <= set(skippable)


def drifts(verdict: Verdict) -> bool:
    """The rule drift, or a loss that is not finite, which needs no profile."""
    if verdict.loss is None:
        return True
    known = verdict.known
    return known is not None and known.drift_nats is not None and known.thresholds.drifts(known.drift_nats)


def share(part: int, whole: int) -> str:
    """`95 % (19 of 20)`."""
    return "none" if not whole else f"{100 * part / whole:.0f} % ({part} of {whole})"


def table(heading: Sequence[str], rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
