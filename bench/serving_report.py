"""Tables of the serving benchmark: medians of paired ratios with bootstrap intervals."""

import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from report import Table

HEAD = [
    "# What Flipwatch costs a serving vLLM\n",
    "Written by `bench/serving_impact.py`; [bench/README.md](../../bench/README.md) says how. CPU, bf16, one thread "
    "for each server: a plain vLLM and one with Flipwatch are alive at the same time and driven in turn by vLLM's own "
    "benchmark client. Each ratio is of two segments next to each other; the tables show the median over the pairs and "
    "a 95 % bootstrap interval of that median. The row `nothing` compares plain with plain: what the machine makes "
    "of no difference. Where its interval is wider than a percent, so are those of the other rows, and the bound comes "
    "from the parts instead: throughput under a condition is at least plain, divided by the ratio of the gates, times "
    "what `held` leaves.\n",
]
_DRAWS = 2000


def figures_of(work: Path, modes: list[str]) -> dict[str, Any]:
    """All that was measured so far."""
    figures: dict[str, Any] = {"engine": {}, "serving": {}}
    for mode in modes:
        if (work / f"engine-{mode}.json").exists():
            figures["engine"][mode] = _engine(json.loads((work / f"engine-{mode}.json").read_text(encoding="utf-8")))
        if (work / f"{mode}.jsonl").exists():
            lines = (work / f"{mode}.jsonl").read_text(encoding="utf-8").splitlines()
            figures["serving"][mode] = _serving([json.loads(line) for line in lines])
    return figures


def _engine(measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": measured["model"],
        "batch": measured["batch"],
        "pairs": len(measured["ratios"]["wall"]),
        "step_ms": {side: 1e3 * statistics.median(times["wall"]) for side, times in measured["step_seconds"].items()},
        **{f"{clock}_ratio": interval(ratios, statistics.median) for clock, ratios in measured["ratios"].items()},
        "kernels": measured["kernels"],
    }


def _serving(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for condition in dict.fromkeys(line["condition"] for line in lines):
        for load in dict.fromkeys(line["load"] for line in lines):
            pairs = [line for line in lines if (line["condition"], line["load"]) == (condition, load)]
            if pairs:
                found.setdefault(condition, {})[load] = _one(pairs)
    return found


def _one(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    def ratios(of: Callable[[dict[str, Any]], float]) -> list[float]:
        return [of(pair["watched"]) / of(pair["plain"]) for pair in pairs]

    def above(quantile: float) -> Callable[[Sequence[dict[str, Any]]], float]:
        """Milliseconds by which a percentile over all tokens of the pairs lies above that of plain."""

        def of(drawn: Sequence[dict[str, Any]]) -> float:
            both = (
                percentile([gap for pair in drawn for gap in pair[side]["itl_ms"]], quantile)
                for side in ("watched", "plain")
            )
            return next(both) - next(both)

        return of

    seconds = sum(pair.get("seconds", 0.0) for pair in pairs)
    parts = sum(pair.get("parts", 0.0) for pair in pairs)
    held = sum(pair.get("held_seconds", 0.0) for pair in pairs)
    return {
        "pairs": len(pairs),
        "throughput": interval(ratios(lambda side: side["tokens_per_second"]), statistics.median),
        "ttft_p50": interval(ratios(lambda side: statistics.median(side["ttft_ms"])), statistics.median),
        "itl_p50": interval(ratios(lambda side: statistics.median(side["itl_ms"])), statistics.median),
        "itl_p99_above_ms": interval(pairs, above(0.99)),
        "itl_p99_ms": {
            side: percentile([gap for pair in pairs for gap in pair[side]["itl_ms"]], 0.99)
            for side in ("plain", "watched")
        },
        "held_share": held / seconds if seconds else 0.0,
        "part_ms": 1e3 * held / parts if parts else None,
    }


def percentile(values: Sequence[float], quantile: float) -> float:
    """The value below which that share of them lies, or the nearest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def interval(values: Sequence[Any], of: Callable[[Sequence[Any]], float]) -> list[float]:
    """A figure of the values, and the 95 % interval of it over draws of as many with replacement."""
    generator = random.Random(0)  # noqa: S311 - reproducible, not secret
    draws = sorted(of(generator.choices(values, k=len(values))) for _ in range(_DRAWS if len(values) > 1 else 1))
    return [of(values), draws[int(0.025 * len(draws))], draws[min(len(draws) - 1, int(0.975 * len(draws)))]]


def tables_of(figures: dict[str, Any]) -> list[Table]:
    """For people."""
    tables = []
    if figures["engine"]:
        rows = []
        for mode, of in figures["engine"].items():
            kernels = of["kernels"]
            counted = (
                "none"
                if kernels is None
                else ", ".join(
                    f"{side} {count['kernels']} calls, {count['operations']} operations"
                    for side, count in kernels.items()
                )
            )
            step = of["step_ms"]
            rows.append(
                [
                    mode,
                    of["model"],
                    str(of["pairs"]),
                    f"{step['plain']:.1f} and {step['gated']:.1f}",
                    _shown(of["wall_ratio"]),
                    _shown(of["cpu_ratio"]),
                    counted,
                ]
            )
        text = (
            "Decode steps of two engines that step in turn, with all gates at 1: what the gates alone cost. The "
            "fastest quarter of each burst counts. A ratio below 1 is not the gates' doing: two processes differ by "
            "themselves. Calls and operations are those of the code that inductor made."
        )
        columns = [
            "mode",
            "model",
            "pairs",
            "ms per step, plain and gated",
            "gated / plain",
            "in CPU seconds",
            "inductor",
        ]
        tables.append(Table("Gates", text, columns, rows))
    for mode, conditions in figures["serving"].items():
        rows = [
            [
                condition,
                load,
                str(of["pairs"]),
                _shown(of["throughput"]),
                _shown(of["ttft_p50"], 2),
                _shown(of["itl_p50"], 2),
                f"{of['itl_p99_ms']['plain']:.0f} and {of['itl_p99_ms']['watched']:.0f}",
                _shown(of["itl_p99_above_ms"], 0),
                _held(of["held_share"], of["part_ms"]),
            ]
            for condition, loads in conditions.items()
            for load, of in loads.items()
        ]
        text = (
            "Ratios are watched over plain. `above plain` is the difference of the ITL p99 over all tokens of the "
            "pairs; `held` is the share of the time for which parts held the engine."
        )
        columns = [
            *("condition", "load", "pairs", "throughput", "TTFT p50", "ITL p50"),
            *("ITL p99, ms", "above plain, ms", "held"),
        ]
        tables.append(Table(f"Serving, {mode}", text, columns, rows))
    return tables


def _shown(figure: Sequence[float], digits: int = 3) -> str:
    value, low, high = figure
    return f"{value:.{digits}f}" + ("" if low == high else f" ({low:.{digits}f} to {high:.{digits}f})")


def _held(share: float, part_ms: float | None) -> str:
    return "none" if part_ms is None else f"{100 * share:.1f} % in parts of {part_ms:.0f} ms"
