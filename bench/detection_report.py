"""The tables and the JSON of the detection benchmark."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import detection_plots
from detection import SKIPPABLE_NATS
from detection_judge import SCORES, Results, Score, Verdict
from detection_tables import Chapter, by_kind, by_position, by_score, cheaper, drifts, share, table

from flipwatch.monitors.alpha_scan import AlphaScanReading
from flipwatch.monitors.finding import Action


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


def _model(results: Results, docs: Path, stem: str) -> Chapter:
    """One model's figures and its chapter."""
    header, costs = results.header, results.skip_costs()
    size = header["size"]
    chapter = [f"## {results.title}\n"]
    chapter.append(
        f"{header['architecture']}, {header['blocks']} blocks, torch {header['torch']}, CPU. Scans of faults: "
        f"{size['sequences']} sequences of {size['tokens']} tokens, quick grid.\n"
    )
    skippable = [block for block, cost in enumerate(costs) if cost <= SKIPPABLE_NATS]
    chapter.append(
        "Leaving one block out of the healthy model costs (nats): "
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
        figures["scores"], lines = by_score(singles, skippable)
        chapter += lines
        figures["kinds"], lines = by_kind(results, singles, skippable)
        chapter += lines
        figures["positions"], lines = by_position(singles, skippable, header["blocks"])
        chapter += lines
        figures["cheaper"], lines = cheaper(singles, results.plan())
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
    finding, known = verdict.finding, verdict.known
    return {
        "case": verdict.case.model_dump(mode="json"),
        "loss": verdict.loss,
        "healthy": verdict.healthy,
        "flagged": finding.flagged,
        "first": {score.name: verdict.first(score) for score in SCORES},
        "top": {score.name: _finite(verdict.top(score)) for score in SCORES},
        "drift": None if known is None else known.drift_nats,
        "drift_t": None if known is None else known.drift_t,
        "predicted": finding.predicted_loss_nats,
        "passes": finding.passes,
    }


def _healthy(results: Results, scans: Sequence[tuple[int, Any]]) -> Chapter:
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
        rows.append([score.name, *(f"{alarms[size]}" for size in sizes), share(sum(alarms.values()), len(scans))])
    lines = []
    if scans:
        counts = {size: sum(1 for n, _ in scans if n == size) for size in sizes}
        most = max(s.skip_gain for _, finding in scans for s in finding.blocks if s.skip_gain is not None)
        figures["largest_skip_gain"] = most
        figures["scans_of_size"] = counts
        lines.append(
            f"### Healthy: {len(scans)} scans, {figures['flags']} flagged by the rule harm\n\n"
            f"Validation sets of {', '.join(f'{size} ({counts[size]} scans)' for size in sizes)} sequences, disjoint "
            f"for each size and shuffle, put together from one measurement of {results.header['texts']} texts. Largest "
            f"skip gain in any: {most:+.3f} nats.\n"
        )
        lines.append(table(["False alarms", *(f"{size} sequences" for size in sizes), "of all"], rows))
    again = results.again()
    if again is not None:
        moved = {
            score.name: max((v for s in again.blocks if (v := score.value(s)) is not None), default=None)
            for score in SCORES
            if score.profile
        }
        figures["again"] = {"drift": again.drift_nats, "drift_t": again.drift_t, "z": moved}
        lines.append(
            f"Against its own clean profile, measured again in batches of another size: drift {again.drift_nats:+.4f} "
            "nats, largest "
            + ", ".join(f"{name} {value:.1f}" for name, value in moved.items() if value is not None)
            + ".\n"
        )
    return figures, lines


def _alarm(score: Score, blocks: Iterable[Any]) -> bool:
    return any((value := score.value(block)) is not None and value >= score.threshold for block in blocks)


def _located(cases: list[Verdict], title: str) -> Chapter:
    """Are all damaged blocks flagged, and only they?"""
    figures: dict[str, Any] = {}
    rows = []
    for kind in dict.fromkeys(v.case.kind for v in cases):
        some = [v for v in cases if v.case.kind == kind]
        every = sum(set(v.case.blocks) <= set(v.finding.flagged) for v in some)
        only = sum(v.case.blocks == list(v.finding.flagged) for v in some)
        any_of = sum(bool(set(v.case.blocks) & set(v.finding.flagged)) for v in some)
        figures[kind] = {"cases": len(some), "all_flagged": every, "exactly": only, "one_flagged": any_of}
        known = [v.known.flagged if v.known is not None else () for v in some]
        with_profile = sum(set(v.case.blocks) <= set(flags) for v, flags in zip(some, known, strict=True))
        exact = sum(tuple(v.case.blocks) == flags for v, flags in zip(some, known, strict=True))
        missed = [
            f"{v.case.name}: {list(v.finding.flagged)}" for v in some if set(v.case.blocks) - set(v.finding.flagged)
        ]
        figures[kind]["missed"] = missed
        figures[kind] |= {"all_flagged_with_profile": with_profile, "exactly_with_profile": exact}
        counts = [any_of, every, only, *([with_profile, exact] if any(known) else [])]
        rows.append([kind, str(len(some)), *(share(count, len(some)) for count in counts)])
    heading = ["", "cases", "one of them flagged", "all flagged", "exactly these"]
    if any(len(row) > len(heading) for row in rows):
        heading += ["all flagged, profile", "exactly these, profile"]
    return figures, [f"### {title}\n", table(heading, rows)]


def _outside(cases: list[Verdict]) -> Chapter:
    """What no block's score can place: only a drift against a profile shows it."""
    figures: dict[str, Any] = {}
    rows = []
    for kind in dict.fromkeys(v.case.kind for v in cases):
        some = [v for v in cases if v.case.kind == kind]
        losses = ", ".join("not finite" if v.damage is None else f"{v.damage:+.2f}" for v in some)
        drift = sum(drifts(v) for v in some)
        blamed = sum(bool(v.finding.flagged) for v in some)
        advised = sum(v.known is not None and v.known.action is Action.SKIP for v in some)
        figures[kind] = {"cases": len(some), "drift": drift, "a_block_blamed": blamed, "skip_advised": advised}
        rows.append([kind, losses, *(share(count, len(some)) for count in (drift, blamed, advised))])
    return figures, [
        "### Outside the blocks\n",
        table(["", "damage in nats", "drift seen (profile)", "a block flagged for it", "skip advised (profile)"], rows),
    ]


def _naive(results: Results, naive: dict[str, Any]) -> Chapter:
    """The naive scan of the full grid, the quick scan and the scan at alpha 0 alone, measured in one run each."""
    rows, figures = [], []
    ratios: dict[str, list[float]] = {"quick": [], "skip": []}
    for name, record in naive.items():
        case = name.removeprefix("naive/")
        quick = results.records[case]["readings"][0]
        slow, quick, skip = map(AlphaScanReading.model_validate, (record["naive"], quick, record["skip"]))
        flagged = [list(results.scan.judge([reading]).flagged) for reading in (slow, quick, skip)]
        for scan, values in ratios.items():
            values.append(record["naive_seconds"] / record[f"{scan}_seconds"])
        passes = [record[f"{scan}_passes"] for scan in ("naive", "quick", "skip")]
        figures.append(
            {"case": case, "flagged": flagged, "passes": passes} | {scan: ratios[scan][-1] for scan in ratios}
        )
        cells = [*(f"{count:.1f}" for count in passes), *(f"{values[-1]:.1f}" for values in ratios.values())]
        rows.append([case, *cells, *map(str, flagged)])
    heading = ["Fault", "passes: naive", "quick", "alpha 0 alone", "time: naive / quick", "naive / alpha 0 alone"]
    heading += ["flagged: naive", "quick", "alpha 0 alone"]
    lines = ["### Naive 9-alpha scan and cheaper grids, in one run\n", table(heading, rows)]
    told = [f"{scan} {statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for scan, v in ratios.items()]
    lines.append(f"Median ratios of time, with their spread: {'; '.join(told)}.\n")
    return {"cases": figures, "ratio_medians": {scan: statistics.median(v) for scan, v in ratios.items()}}, lines


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


_INTRODUCTION = """# Detection: what the alpha-scan finds, and what it does not

Made by `bench/detection.py` (see `bench/README.md` for the commands); do not edit by hand. Every figure below is
computed from readings of the local engine on the CPU; nothing here was run on a GPU. The figures of every fault are in
`results.json`.

How to read it: a fault's damage is what it adds to the loss on the scan's own texts, in nats per scored token. A block
is *skippable* when the healthy model without it loses at most 0.5 nats. *Ranked first* asks whether the score is
largest at the damaged block, *called damaged* whether any block's score reaches the threshold (6 for a z, 0.1 nats
for a gain). The rule *harm* is what flags: the block with the largest skip gain, when that is at least 0.1 nats and 3
standard errors, over at least 8 sequences; then the scan goes on without it. Rows with *profile* compare with a clean
profile of the same model on the same texts. Of each kind only so many faults per class of damage were scanned, since
most random flips do nothing: *drawn* counts all.
"""
