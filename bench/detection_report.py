"""The tables and the JSON of the detection benchmark."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import detection_plots
from detection import BUCKETS, SKIPPABLE_NATS, damage_class
from detection_judge import HARM, SCORES, Results, Score, Verdict

from flipwatch.monitors.alpha_scan import FULL_GRID, AlphaScan, AlphaScanReading
from flipwatch.monitors.alpha_scan.rounds import GROUP

CLASSES = (f"below {BUCKETS[0]} nats", f"{BUCKETS[0]} to {BUCKETS[1]}", f"{BUCKETS[1]} and more")
Row = list[str]


def write(work: Path, docs: Path) -> None:
    """Judge all readings in `work`; write `README.md`, `results.json` and the plots into `docs`."""
    docs.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    text = [_INTRODUCTION]
    for path in sorted(work.glob("*.jsonl"), reverse=True):
        results = Results(path)
        if "healthy/order" not in results.records:
            continue
        mine, sections = _model(results, docs, path.stem)
        figures[results.title] = mine
        text += sections
    (docs / "README.md").write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    (docs / "results.json").write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _model(results: Results, docs: Path, stem: str) -> tuple[dict[str, Any], list[str]]:
    """One model's figures and its chapter."""
    header, costs = results.header, results.skip_costs()
    size = header["size"]
    chapter = [f"## {results.title}\n"]
    chapter.append(
        f"{header['architecture']}, {header['blocks']} blocks, torch {header['torch']}, CPU. Scans of faults: {size['sequences']} "
        f"sequences of {size['tokens']} tokens, quick grid.\n"
    )
    skippable = [block for block, cost in enumerate(costs) if cost <= SKIPPABLE_NATS]
    chapter.append(
        f"Leaving one block out of the healthy model costs (nats): "
        + ", ".join(f"{block}: {cost:.2f}" for block, cost in enumerate(costs))
        + f". Skippable (at most {SKIPPABLE_NATS} nats): {len(skippable)} of {len(costs)}.\n"
    )
    figures: dict[str, Any] = {"header": header | {"order": None}, "skip_costs_nats": costs, "skippable": skippable}
    healthy = list(results.healthy_scans())
    figures["healthy"], lines = _healthy(results, healthy)
    chapter += lines
    singles = list(results.verdicts("single/"))
    if singles:
        figures["faults"] = [_summary(verdict) for verdict in singles]
        figures["scores"], lines = _scores(singles, skippable)
        chapter += lines
        figures["kinds"], lines = _kinds(results, singles, skippable)
        chapter += lines
        figures["positions"], lines = _positions(singles, skippable, header["blocks"])
        chapter += lines
        figures["cheaper"], lines = _cheaper(singles)
        chapter += lines
        detection_plots.roc(docs / f"{stem}-roc.png", singles, healthy, results.title)
        detection_plots.gains(docs / f"{stem}-gains.png", singles, skippable, results.title)
        detection_plots.recovered(docs / f"{stem}-recovered.png", singles, skippable, results.title)
        chapter.append(
            f"![ROC]({stem}-roc.png)\n\n![Gain against damage]({stem}-gains.png)\n\n"
            f"![Recovered share]({stem}-recovered.png)\n"
        )
    for name, prefix, title in (
        ("not_finite", "not-finite/", "NaN, Inf and saturation in every skippable block, one to three at a time"),
        ("several", "several/", "Two and three finite faults at once"),
    ):
        cases = list(results.verdicts(prefix))
        if cases:
            figures[name], lines = _located(cases, title)
            chapter += lines
    beyond = list(results.verdicts("outside/"))
    if beyond:
        figures["outside"], lines = _outside(beyond)
        chapter += lines
    naive = {name: record for name, record in results.records.items() if name.startswith("naive/")}
    if naive:
        figures["naive"], lines = _naive(results, naive)
        chapter += lines
    return figures, chapter


def _summary(verdict: Verdict) -> dict[str, Any]:
    """One fault in the JSON: enough to draw every plot and table again."""
    finding = verdict.finding
    return {
        "case": verdict.case.model_dump(mode="json"),
        "loss": verdict.loss,
        "healthy": verdict.healthy,
        "flagged": finding.flagged,
        "first": {score.name: verdict.first(score) for score in SCORES},
        "top": {score.name: _finite(verdict.top(score)) for score in SCORES},
        "drift": finding.drift_nats,
        "drift_t": finding.drift_t,
        "predicted": finding.predicted_loss_nats,
        "passes": finding.passes,
    }


def _healthy(results: Results, scans: Sequence[tuple[int, Any]]) -> tuple[dict[str, Any], list[str]]:
    """False alarms of each score."""
    figures: dict[str, Any] = {"scans": len(scans), "flags": sum(1 for _, finding in scans if finding.flagged)}
    sizes = sorted({size for size, _ in scans})
    rows = []
    for score in SCORES:
        if score.profile:
            continue
        alarms = {}
        for size in sizes:
            of_size = [finding for n, finding in scans if n == size]
            alarms[size] = sum(_alarm(score, finding.blocks) for finding in of_size)
        figures[score.name] = alarms
        rows.append([score.name, *(f"{alarms[size]}" for size in sizes), _share(sum(alarms.values()), len(scans))])
    lines = []
    if scans:
        counts = {size: sum(1 for n, _ in scans if n == size) for size in sizes}
        most = max(s.skip_gain for _, finding in scans for s in finding.blocks if s.skip_gain is not None)
        figures["largest_skip_gain"] = most
        figures["scans_of_size"] = counts
        lines.append(
            f"### Healthy: {len(scans)} scans, {figures['flags']} flagged by the rule harm\n\n"
            f"Validation sets of {', '.join(f'{size} ({counts[size]} scans)' for size in sizes)} sequences, disjoint for each size and "
            f"shuffle, put together from one measurement of {results.header['texts']} texts. Largest skip gain in any: {most:+.3f} nats.\n"
        )
        lines.append(_table(["False alarms", *(f"{size} sequences" for size in sizes), "of all"], rows))
    again = results.again()
    if again is not None:
        moved = {
            score.name: max((v for s in again.blocks if (v := score.value(s)) is not None), default=None)
            for score in SCORES
            if score.profile
        }
        figures["again"] = {"drift": again.drift_nats, "drift_t": again.drift_t, "z": moved}
        lines.append(
            f"Against its own clean profile, measured again in batches of another size: drift {again.drift_nats:+.4f} nats, largest "
            + ", ".join(f"{name} {value:.1f}" for name, value in moved.items() if value is not None)
            + ".\n"
        )
    return figures, lines


def _alarm(score: Score, blocks: Iterable[Any]) -> bool:
    return any((value := score.value(block)) is not None and value >= score.threshold for block in blocks)


def _scores(singles: list[Verdict], skippable: list[int]) -> tuple[dict[str, Any], list[str]]:
    """Rank 1 and detection of each score, by damage, and for skippable blocks."""
    groups: list[tuple[str, Callable[[Verdict], bool]]] = [
        (f"all, {CLASSES[number]}", lambda v, n=number: damage_class(v.healthy, v.loss) == n) for number in range(3)
    ]
    groups.append(
        (
            f"skippable block, {CLASSES[2]}",
            lambda v: damage_class(v.healthy, v.loss) == 2 and set(v.case.blocks) <= set(skippable),
        )
    )
    figures: dict[str, Any] = {}
    rows_rank, rows_detected = [], []
    members = {name: [v for v in singles if test(v)] for name, test in groups}
    for score in SCORES:
        ranked = {name: sum(v.first(score) in v.case.blocks for v in some) for name, some in members.items()}
        found = {name: sum(v.detects(score) for v in some) for name, some in members.items()}
        figures[score.name] = {"rank_1": ranked, "detected": found}
        rows_rank.append([score.name, *(_share(ranked[name], len(some)) for name, some in members.items())])
        rows_detected.append([score.name, *(_share(found[name], len(some)) for name, some in members.items())])
    drifted = {name: sum(_drifts(v) for v in some) for name, some in members.items()}
    figures["drift"] = {"detected": drifted}
    rows_detected.append(["drift, profile", *(_share(drifted[name], len(some)) for name, some in members.items())])
    flagged = {name: sum(set(v.case.blocks) <= set(v.finding.flagged) for v in some) for name, some in members.items()}
    others = {name: sum(bool(set(v.finding.flagged) - set(v.case.blocks)) for v in some) for name, some in members.items()}
    figures["flagged"], figures["others_flagged"] = flagged, others
    figures["members"] = {name: len(some) for name, some in members.items()}
    heading = ["", *(f"{name} ({len(some)})" for name, some in members.items())]
    last = [v.recovered for v in members[groups[-1][0]]]
    recovered = [share for share in last if share is not None]
    figures["recovered_median"] = statistics.median(recovered) if recovered else None
    figures["recovered"] = recovered
    lines = [
        "### Faults in one block\n",
        "The damaged block is ranked first by:\n",
        _table(heading, rows_rank),
        "The model is called damaged by:\n",
        _table(heading, rows_detected),
        "The finding (rule harm, all rounds):\n",
        _table(
            heading,
            [
                ["flags the damaged block", *(_share(flagged[name], len(some)) for name, some in members.items())],
                ["flags another block", *(_share(others[name], len(some)) for name, some in members.items())],
            ],
        ),
    ]
    if recovered:
        lines.append(
            f"Recovered share of the lost loss, flagged blocks left out, faults of {CLASSES[2]} nats in skippable blocks with a finite loss: "
            f"median {statistics.median(recovered):.2f}, {min(recovered):.2f} to {max(recovered):.2f}, {len(recovered)} faults.\n"
        )
    return figures, lines


def _kinds(results: Results, singles: list[Verdict], skippable: list[int]) -> tuple[dict[str, Any], list[str]]:
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
            told[CLASSES[number]] = {"scanned": len(some), "flagged": hit, "drift": sum(_drifts(v) for v in some)}
            cells.append(_share(hit, len(some)))
        able = [
            v
            for v in singles
            if v.case.kind == kind and set(v.case.blocks) <= set(skippable) and damage_class(v.healthy, v.loss) == 2
        ]
        hit = sum(set(v.case.blocks) <= set(v.finding.flagged) for v in able)
        figures[kind] = {"drawn": counts, "by_damage": told, "skippable": {"scanned": len(able), "flagged": hit}}
        rows.append([kind, " / ".join(map(str, counts)), *cells, _share(hit, len(able))])
    heading = ["Kind", "drawn, by damage", *(f"flagged, {name}" for name in CLASSES), "skippable, " + CLASSES[2]]
    return figures, ["### By kind of fault\n", _table(heading, rows)]


def _positions(singles: list[Verdict], skippable: list[int], blocks: int) -> tuple[dict[str, Any], list[str]]:
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
        drift = sum(_drifts(v) for v in some)
        figures[name] = {"faults": len(some), "flagged": hit, "drift": drift}
        rows.append([name, str(len(some)), _share(hit, len(some)), _share(drift, len(some))])
    lines = [
        f"### By position, faults of {CLASSES[2]} nats\n",
        _table(["", "faults", "block flagged", "drift seen (profile)"], rows),
    ]
    return figures, lines


def _cheaper(singles: list[Verdict]) -> tuple[dict[str, Any], list[str]]:
    """Would the cheaper strategies have flagged the same block?"""
    plain = [v for v in singles if v.complete and v.loss is not None]
    if not plain:
        return {}, []
    grouped = [v for v in plain if v.groups is not None]
    same_groups = sum(_grouped_flag(v) == v.finding.flagged[:1] for v in grouped)
    flagged = [v for v in grouped if v.finding.flagged]
    kept_groups = sum(_grouped_flag(v) == _first_flag(v) for v in flagged)
    slopes = [v for v in plain if v.finding.flagged]
    kept_slopes = sum(_first_flag(v)[0] in _steepest(v) for v in slopes)
    figures = {
        "grouped": {"cases": len(flagged), "same": kept_groups, "all": len(grouped), "same_all": same_groups},
        "slopes": {"cases": len(slopes), "same": kept_slopes},
    }
    rows = [
        [f"groups of {GROUP} first", _share(kept_groups, len(flagged))],
        ["a quarter of the blocks, by slope, first", _share(kept_slopes, len(slopes))],
    ]
    lines = ["### Cheaper scans, among faults that the quick scan flags\n", _table(["Strategy", "same block flagged"], rows)]
    return figures, lines


def _first_flag(verdict: Verdict) -> tuple[int, ...]:
    """What the first round flags."""
    scan = AlphaScan()
    return scan.judge(verdict.readings[:1]).flagged


def _grouped_flag(verdict: Verdict) -> tuple[int, ...]:
    """What the strategy `grouped` flags: its second stage measures losses that the plain scan has measured too."""
    if verdict.groups is None:
        return ()
    scan = AlphaScan()
    gains = {}
    for start in range(0, len(verdict.groups.nats), GROUP):
        score = scan.judge([verdict.groups.model_copy(update={"group": 1})]).blocks[start]
        gains[start] = score.skip_gain if score.skip_gain is not None else float("-inf")
    best = sorted(gains, key=lambda start: -gains[start])[:2]
    inside = {block for start in best for block in range(start, start + GROUP)}
    served: AlphaScanReading = verdict.readings[0]
    part = served.model_copy(update={"nats": [rows if b in inside else [] for b, rows in enumerate(served.nats)]})
    return scan.judge([part]).flagged


def _steepest(verdict: Verdict) -> set[int]:
    """The quarter of the blocks with the largest slope, up or down."""
    slopes = [(abs(s.slope), s.block) for s in verdict.finding.blocks if s.slope is not None]
    return {block for _, block in sorted(slopes, reverse=True)[: max(1, len(verdict.finding.blocks) // 4)]}


def _located(cases: list[Verdict], title: str) -> tuple[dict[str, Any], list[str]]:
    """Are all damaged blocks flagged, and only they?"""
    figures: dict[str, Any] = {}
    rows = []
    for kind in dict.fromkeys(v.case.kind for v in cases):
        some = [v for v in cases if v.case.kind == kind]
        every = sum(set(v.case.blocks) <= set(v.finding.flagged) for v in some)
        only = sum(v.case.blocks == list(v.finding.flagged) for v in some)
        any_of = sum(bool(set(v.case.blocks) & set(v.finding.flagged)) for v in some)
        figures[kind] = {"cases": len(some), "all_flagged": every, "exactly": only, "one_flagged": any_of}
        missed = [f"{v.case.name}: {list(v.finding.flagged)}" for v in some if set(v.case.blocks) - set(v.finding.flagged)]
        figures[kind]["missed"] = missed
        rows.append([kind, str(len(some)), _share(any_of, len(some)), _share(every, len(some)), _share(only, len(some))])
    heading = ["", "cases", "one of them flagged", "all flagged", "exactly these"]
    return figures, [f"### {title}\n", _table(heading, rows)]


def _outside(cases: list[Verdict]) -> tuple[dict[str, Any], list[str]]:
    """What no block's score can place: only a drift against a profile shows it."""
    figures: dict[str, Any] = {}
    rows = []
    for kind in dict.fromkeys(v.case.kind for v in cases):
        some = [v for v in cases if v.case.kind == kind]
        losses = ", ".join("not finite" if v.damage is None else f"{v.damage:+.2f}" for v in some)
        drift = sum(_drifts(v) for v in some)
        blamed = sum(bool(v.finding.flagged) for v in some)
        figures[kind] = {"cases": len(some), "drift": drift, "a_block_blamed": blamed}
        rows.append([kind, losses, _share(drift, len(some)), _share(blamed, len(some))])
    return figures, [
        "### Outside the blocks\n",
        _table(["", "damage in nats", "drift seen (profile)", "a block flagged for it"], rows),
    ]


def _naive(results: Results, naive: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The naive scan of the full grid beside the quick scan, measured in one run each."""
    rows, figures, ratios = [], [], []
    for name, record in naive.items():
        case = name.removeprefix("naive/")
        quick = AlphaScanReading.model_validate(results.records[case]["readings"][0])
        slow = AlphaScanReading.model_validate(
            quick.model_dump() | {"alphas": list(FULL_GRID), "nats": record["nats"], "base_nats": record["base"]}
        )
        flagged = [list(results.scan.judge([reading]).flagged) for reading in (slow, quick)]
        ratio = record["naive_seconds"] / record["quick_seconds"]
        ratios.append(ratio)
        figures.append({"case": case, "ratio": ratio, "naive": flagged[0], "quick": flagged[1]} | _cost(record))
        rows.append([case, f"{record['naive_passes']:.0f}", f"{record['quick_passes']:.1f}", f"{ratio:.1f}", *map(str, flagged)])
    heading = ["Fault", "passes, naive", "passes, quick", "time, naive / quick", "naive flags", "quick flags"]
    lines = ["### Naive 9-alpha scan and quick scan, in one run\n", _table(heading, rows)]
    lines.append(f"Median ratio {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}).\n")
    return {"cases": figures, "ratio_median": statistics.median(ratios)}, lines


def _cost(record: dict[str, Any]) -> dict[str, float]:
    return {name: record[name] for name in ("naive_seconds", "quick_seconds", "naive_passes", "quick_passes")}


def _drifts(verdict: Verdict) -> bool:
    """The rule drift, or a loss that is not finite, which needs no profile."""
    finding, limits = verdict.finding, verdict.finding.thresholds
    if verdict.loss is None:
        return True
    return (
        finding.drift_nats is not None
        and finding.drift_t is not None
        and finding.drift_nats >= limits.min_drift_nats
        and finding.drift_t >= limits.min_drift_t
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or value in (float("inf"), float("-inf")) else value


def _share(part: int, whole: int) -> str:
    """`95 % (19 of 20)`."""
    return "none" if not whole else f"{100 * part / whole:.0f} % ({part} of {whole})"


def _table(heading: Sequence[str], rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


_INTRODUCTION = """# Detection: what the alpha-scan finds, and what it does not

Made by `bench/detection.py` (see `bench/README.md` for the commands); do not edit by hand. Every figure below is computed from
readings of the local engine on the CPU; nothing here was run on a GPU. The figures of every fault are in `results.json`.

How to read it: a fault's damage is what it adds to the loss on the scan's own texts, in nats per scored token. A block is
*skippable* when the healthy model without it loses at most 0.5 nats. *Rank 1* asks whether the score is largest at the
damaged block, *called damaged* whether any block's score reaches the threshold (6 for a z, 0.05 nats for a gain). The
rule *harm* is what flags: the block with the largest skip gain, when that is at least 0.05 nats and 3 standard errors;
then the scan goes on without it. Rows with *profile* compare with a clean profile of the same model on the same texts.
Of each kind only so many faults per class of damage were scanned, since most random flips do nothing: *drawn* counts all.
"""
