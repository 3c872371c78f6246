"""What the single records of the differential benchmark come to: counts, largest distances, misses."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

Records = Sequence[dict[str, Any]]

INPUT_OF = {"recorded": "recorded", "checkpoint": "checkpoint", "other kernels": "recorded"}
"""Reference -> whose inputs the truth was measured on."""

LEVELS = {"recorded": ("exact", "sublayer", "module"), "checkpoint": ("exact", "sublayer", "module", "tensor")}
LEVELS["other kernels"] = LEVELS["recorded"]

FACTORS = (2.0, 3.0, 4.0, 6.0, 8.0)
"""Multiples of the noise of rounding that the faults are judged by again."""


def faults(records: Records, blocks: int, children: int) -> dict[str, Any]:
    """Counts of how many of how many, by reference; and every miss with what was said."""
    return {
        "faults": len(records),
        "put_back": [sum(record["put_back"] for record in records), len(records)],
        "kinds": _counted(record["kind"] for record in records),
        "whats": _counted(record["what"] for record in records),
        "counts": _counted(str(record["count"]) for record in records),
        "blocks_hit": len({record["block"] for record in records}),
        "in_first_and_last": [
            sum(record["block"] == 0 for record in records),
            sum(record["block"] == blocks - 1 for record in records),
        ],
        "limits": {"children": blocks + children + 1, "two": blocks + 2 + 1},
        "references": {name: _reference(records, name) for name in LEVELS},
    }


def _reference(records: Records, name: str) -> dict[str, Any]:
    over = [record for record in records if record["more_than_noise"][INPUT_OF[name]]]
    under = [record for record in records if not record["more_than_noise"][INPUT_OF[name]]]
    unchanged = [record for record in under if record["change"][INPUT_OF[name]] == 0.0]
    levels = LEVELS[name]
    made = [made for record in over for made in record["said"][name]["comparisons"]]
    return {
        "more_than_noise": {level: levelled(over, name, level) for level in levels},
        "by_kind": {
            kind: {level: levelled([r for r in over if r["kind"] == kind], name, level) for level in levels}
            for kind in sorted({record["kind"] for record in records})
        },
        "by_what": {
            what: {level: levelled([r for r in over if r["what"] == what], name, level) for level in levels}
            for what in sorted({record["what"] for record in records})
        },
        "within_noise": [
            sum(r["said"][name]["found"] for r in under if r not in unchanged),
            len(under) - len(unchanged),
        ],
        "unchanged": [sum(r["said"][name]["found"] for r in unchanged), len(unchanged)],
        "unchanged_health": _counted(r["said"][name]["health"] for r in unchanged),
        "comparisons": {"located": len(made), "most": max(made, default=0), "sorted": sorted(made)},
        "effort": [r["said"][name]["effort"] for r in over if "effort" in r["said"][name]][:1],
        "misses": [_miss(r, name) for r in over if not all(r["said"][name][level] for level in levels)]
        if name != "other kernels"
        else [],
    }


def levelled(records: Records, name: str, level: str) -> list[int]:
    """How many of how many are right down to this level."""
    return [sum(bool(record["said"][name][level]) for record in records), len(records)]


def by_factor(records: Records, rounding: float) -> dict[str, list[int]]:
    """Of the faults that change a block, how many it shows with other kernels, had this multiple been allowed."""
    over = [record for record in records if record["more_than_noise"]["recorded"]]
    return {
        f"{factor:g}": [sum(_departs(record, factor / rounding) for record in over), len(over)] for factor in FACTORS
    }


def _departs(record: dict[str, Any], scale: float) -> bool:
    said = record["said"]["other kernels"]
    return said["l2"] is None or said["l2"] > scale * said["allowed"]


def _miss(record: dict[str, Any], name: str) -> dict[str, Any]:
    told = {key: record[key] for key in ("kind", "count", "bit", "block", "what", "first", "elements")}
    return {**told, "change": record["change"][INPUT_OF[name]], "said": record["said"][name]}


def triples(records: Records) -> dict[str, Any]:
    """All three found in one pass, and nothing else."""
    return {
        "triples": len(records),
        "not_finite": sum(record["not_finite"] for record in records),
        "put_back": [sum(record["put_back"] for record in records), len(records)],
        "references": {
            name: {
                "exact": [sum(record["said"][name]["exact"] for record in records), len(records)],
                "each": {
                    level: [
                        sum(bool(one[level]) for record in records for one in record["said"][name]["each"]),
                        3 * len(records),
                    ]
                    for level in LEVELS[name]
                    if level != "exact"
                },
                "misses": [record for record in records if not record["said"][name]["exact"]],
            }
            for name in ("recorded", "checkpoint")
        },
    }


def healthy(figures: dict[str, Any]) -> dict[str, Any]:
    """By pair: judgements, flags, the largest distances; and the factor that leaves a margin of two."""
    pairs: dict[str, dict[str, Any]] = {}
    for pair, judged in figures["pairs"].items():
        worst = {at: _worst([one[at]["over_allowed"] for one in judged]) for at in ("block", "module", "walk")}
        pairs[pair] = {
            "judgements": len(judged),
            "health": _counted(one["health"] for one in judged),
            "same_numerics": all(one["same_numerics"] for one in judged),
            "l2": {at: _worst([one[at]["l2"] for one in judged]) for at in ("block", "module", "walk")},
            "over_allowed": worst,
            "nats_apart": max(
                (abs(one["nats"][0] - one["nats"][1]) for one in judged if None not in one["nats"]), default=0.0
            ),
            "not_ok": [one["reason"] for one in judged if one["health"] != "ok"][:3],
        }
    others = [one["over_allowed"] for one in pairs.values() if not one["same_numerics"]]
    rounding = figures["factors"]["rounding"]
    return {
        "judgements": sum(one["judgements"] for one in pairs.values()),
        "not_ok": sum(one["judgements"] - one["health"].get("ok", 0) for one in pairs.values()),
        "factors": figures["factors"],
        "threads": figures["threads"],
        "needed_rounding_factor": {
            at: _scaled(_worst([one[at] for one in others]), rounding) for at in ("block", "module", "walk")
        },
        "pairs": pairs,
    }


def _worst(values: Iterable[float | None]) -> float | None:
    """The largest; None: one has no number."""
    largest = max((math.inf if value is None else value for value in values), default=0.0)
    return largest if math.isfinite(largest) else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))
