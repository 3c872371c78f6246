"""The lines of a soak as figures and tables."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from report import Table, page, publish, spread

_HEAD = [
    "# Soak\n",
    "Written by `bench/soak.py`, on the CPU build of vLLM with 2 cores that also did other work.\n",
]


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a run that ended, or of the part that there is."""
    faults = [line["fault"] | {"seconds": line["seconds"]} for line in lines if "fault" in line]
    end = next((line["end"] for line in lines if "end" in line), None)
    head = next(line["head"] for line in lines if "head" in line)
    last = faults[-1]
    swaps = [fault["swap"] for fault in faults if fault["swap"] is not None]
    return {
        "benchmark": "soak",
        **head,
        "ended": end is not None,
        "hours": (end or last)["seconds"] / 3600,
        "requests_whole": end["whole"] if end else last["load"]["whole"],
        "requests_lost": len(end["lost"]) if end else last["load"]["lost"],
        "lost": end["lost"][:10] if end else [],
        "faults": len(faults),
        "found": sum(fault["found"] for fault in faults),
        "repaired": sum(fault.get("repair") == "repaired" for fault in faults),
        "intact": sum(fault["intact"] for fault in faults),
        "kinds": dict(sorted(Counter(fault["fault"]["kind"] for fault in faults).items())),
        "found_seconds": [fault["found_seconds"] for fault in faults if fault["found"]],
        "repair_seconds": [fault["repair_seconds"] for fault in faults if fault.get("repair") == "repaired"],
        "swaps": len(swaps),
        "swaps_done": sum((swap["skip"], swap["undo"]) == ("active", "reverted") for swap in swaps),
        "memory": {name: _growth(faults, name) for name in last["memory"]},
        "first_token_seconds_median": end and end["first_token_seconds_median"],
        "longest_gap_seconds": end and end["longest_gap_seconds"],
        "counts": end and end["counts"],
        "not_well": [
            fault for fault in faults if not (fault["found"] and fault["intact"] and fault.get("repair") == "repaired")
        ],
    }


def _growth(faults: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Resident MiB at the start and at the end, and the slope of a line behind the first quarter, MiB per hour."""
    seconds = np.array([fault["seconds"] for fault in faults])
    mib = np.array([fault["memory"][name] for fault in faults])
    late = seconds >= seconds[-1] / 4
    slope = float(np.polyfit(seconds[late] / 3600, mib[late], 1)[0]) if late.sum() > 2 else 0.0
    return {
        "first_mib": float(mib[0]),
        "last_mib": float(mib[-1]),
        "largest_mib": float(mib.max()),
        "mib_per_hour": slope,
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Faults, requests, memory."""
    rows = [
        ["faults injected", str(found["faults"])],
        ["found by a scheduled sweep", str(found["found"])],
        ["repaired, bytes proved", str(found["repaired"])],
        ["seconds from fault to finding", spread(found["found_seconds"], 1)],
        ["seconds from order to repaired", spread(found["repair_seconds"], 1)],
        ["skips with their undo, done of asked", f"{found['swaps_done']} of {found['swaps']}"],
        ["requests with all their tokens", str(found["requests_whole"])],
        ["requests lost", str(found["requests_lost"])],
    ]
    if found["ended"]:
        rows += [
            ["seconds to the first token, median", f"{found['first_token_seconds_median']:.2f}"],
            ["longest gap between two tokens, seconds", f"{found['longest_gap_seconds']:.1f}"],
        ]
    memory = [
        [
            name,
            *(f"{grown[key]:.0f}" for key in ("first_mib", "last_mib", "largest_mib")),
            f"{grown['mib_per_hour']:.1f}",
        ]
        for name, grown in found["memory"].items()
    ]
    kinds = ", ".join(f"{kind} {count}" for kind, count in found["kinds"].items())
    return [
        Table(f"{found['hours']:.2f} hours, {found['clients']} clients", f"Kinds: {kinds}.", ["", "figure"], rows),
        Table(
            "Memory",
            "Resident, all processes of each; the slope is that of a line behind the first quarter of the run.",
            ["", "first MiB", "last MiB", "largest MiB", "MiB per hour"],
            memory,
        ),
    ]


def show(file: Path, figures_file: Path | None, docs: Path | None) -> None:
    """Print the tables of the lines in `file`, and write what is asked for."""
    found = figures([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()])
    shown = tables(found)
    publish(found, shown, page(_HEAD, shown), figures_file, docs)
