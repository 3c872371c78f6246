"""What each score makes of the readings of the detection benchmark: ranks, detections, false alarms."""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detection_cases import Case

from flipwatch.monitors.alpha_scan import (
    AlphaScan,
    AlphaScanFinding,
    AlphaScanPlan,
    AlphaScanReading,
    BlockScore,
    Profile,
    Provenance,
    Thresholds,
    make_profile,
)

SET_SIZES = (4, 8, 16, 32, 64)
"""Sequences in the validation sets of the healthy scans."""

SHUFFLES = 3


@dataclass(frozen=True)
class Score:
    """One way to rank blocks; the model is called damaged when the best block's value is at or above the threshold.

    An infinite one: the score ranks only.
    """

    name: str
    value: Callable[[BlockScore], float | None]
    threshold: float
    profile: bool = False


def _harm(score: BlockScore) -> float | None:
    """The skip gain where it passes its test, else nothing."""
    limits = Thresholds()
    if score.skip_gain is None or score.skip_gain_t is None:
        return None
    return score.skip_gain if score.skip_gain_t >= limits.min_gain_t else min(score.skip_gain, 0.0)


def _match(score: BlockScore) -> float | None:
    """Largest for the block without which the loss is closest to the healthy model's without it."""
    return None if score.without_drift_nats is None else -abs(score.without_drift_nats)


SCORES = (
    Score("BSS z", lambda s: s.bss_z, 6.0),
    Score("largest deviation z", lambda s: s.largest_deviation_z, 6.0),
    Score("slope z", lambda s: s.slope_z, 6.0),
    Score("skip gain z", lambda s: s.skip_gain_z, 6.0),
    Score("skip gain", lambda s: s.skip_gain, Thresholds().min_gain_nats),
    Score("harm (skip gain, tested)", _harm, Thresholds().min_gain_nats),
    Score("BSS z, profile", lambda s: s.bss_profile_z, 6.0, profile=True),
    Score("slope z, profile", lambda s: s.slope_profile_z, 6.0, profile=True),
    Score("skip gain z, profile", lambda s: s.skip_gain_profile_z, 6.0, profile=True),
    Score("match, profile", _match, math.inf, profile=True),
)

HARM = "harm (skip gain, tested)"


@dataclass(frozen=True)
class Verdict:
    """What the scan said about one case."""

    case: Case
    healthy: float
    loss: float | None
    finding: AlphaScanFinding
    """Of the whole scan, without a profile."""
    known: AlphaScanFinding | None
    """With a clean profile of the same texts; of a scan that grew, what it measured on these."""
    complete: bool
    """There are curves of the model as served."""
    groups: AlphaScanReading | None
    readings: list[AlphaScanReading]

    @property
    def damage(self) -> float | None:
        """Nats of loss; None: not finite."""
        return None if self.loss is None else self.loss - self.healthy

    @property
    def recovered(self) -> float | None:
        """Share of the lost loss that comes back without the flagged blocks."""
        predicted = self.finding.predicted_loss_nats
        if predicted is None or self.loss is None or self.loss - self.healthy < 0.1:
            return None
        return (self.loss - predicted) / (self.loss - self.healthy)

    def first(self, score: Score) -> int | None:
        """The block that the score ranks first; what the sequential pass names goes before."""
        if not self.complete:
            return self.finding.flagged[0] if score.name == HARM and self.finding.flagged else None
        valued = [(value, s.block) for s in self._blocks(score) if (value := score.value(s)) is not None]
        return max(valued)[1] if valued else None

    def _blocks(self, score: Score) -> tuple[BlockScore, ...]:
        if not score.profile:
            return self.finding.blocks
        return () if self.known is None else self.known.blocks

    def top(self, score: Score) -> float | None:
        """The best block's value."""
        if not self.complete:
            return float("inf") if score.name == HARM and self.finding.flagged else None
        return max((value for s in self._blocks(score) if (value := score.value(s)) is not None), default=None)

    def detects(self, score: Score) -> bool:
        """Whether the score calls the model damaged."""
        top = self.top(score)
        return top is not None and top >= score.threshold


class Results:
    """The readings of one model and dtype."""

    def __init__(self, path: Path) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            self.records[record["name"]] = record
        self.header = self.records["header"]
        self.scan = AlphaScan()

    @property
    def title(self) -> str:
        """Model and dtype."""
        return f"{self.header['model']}, {self.header['dtype']}"

    def reading(self, name: str) -> AlphaScanReading | None:
        """The only reading of a healthy scan."""
        record = self.records.get(name)
        return None if record is None else AlphaScanReading.model_validate(record["readings"][0])

    def skip_costs(self) -> list[float]:
        """Per block, what leaving it out of the healthy model costs, in nats."""
        reading = self.reading("healthy/order")
        if reading is None:
            return []
        return [-(s.skip_gain or 0.0) for s in self.scan.judge([reading]).blocks]

    def verdicts(self, prefix: str) -> Iterator[Verdict]:
        """All scanned cases of one sort."""
        profile = clean_profile(self.records)
        for name, record in self.records.items():
            if not name.startswith(prefix) or "readings" not in record:
                continue
            readings = [AlphaScanReading.model_validate(reading) for reading in record["readings"]]
            groups = record.get("groups")
            count = 0 if profile is None else len(profile.base_nats)
            same = [r for r in readings if r.first_sequence == 0 and len(r.base_nats) == count]
            known = self.scan.judge(same, profile) if same else None
            yield Verdict(
                case=Case.model_validate(record["case"]),
                healthy=record["healthy"],
                loss=record["loss"],
                finding=self.scan.judge(readings),
                known=known,
                complete=readings[0].complete,
                groups=None if groups is None else AlphaScanReading.model_validate(groups),
                readings=readings,
            )

    def drawn(self, prefix: str) -> list[tuple[Case, float | None, float]]:
        """All cases that were drawn, scanned or not: case, loss with it, healthy loss."""
        return [
            (Case.model_validate(record["case"]), record["loss"], record["healthy"])
            for name, record in self.records.items()
            if name.startswith(prefix) and "case" in record
        ]

    def healthy_scans(self) -> Iterator[tuple[int, AlphaScanFinding]]:
        """Scans of disjoint sets of each size, for several shuffles: (size, finding)."""
        parts = [self.reading(name) for name in self.records if name.startswith("healthy/texts/")]
        everything = [part for part in parts if part is not None]
        if not everything:
            return
        rows = [(part, row) for part in everything for row in range(len(part.base_nats))]
        for shuffle in range(SHUFFLES):
            order = list(rows)
            random.Random(shuffle).shuffle(order)  # noqa: S311 - reproducible, not secret
            for size in SET_SIZES:
                for start in range(0, len(order) - size + 1, size):
                    yield size, self.scan.judge([_subset(order[start : start + size])])

    def again(self) -> AlphaScanFinding | None:
        """The healthy model in batches of another size, against its profile."""
        reading, profile = self.reading("healthy/again"), clean_profile(self.records)
        return None if reading is None or profile is None else self.scan.judge([reading], profile)

    def plan(self) -> AlphaScanPlan:
        """The order of the faults' scans."""
        return AlphaScanPlan.model_validate(self.header["order"])


def clean_profile(records: Mapping[str, dict[str, Any]]) -> Profile | None:
    """Of the healthy model, on the texts that the scans of faults begin with; None before it was measured."""
    record = records.get("healthy/order")
    if record is None:
        return None
    return make_profile(AlphaScanReading.model_validate(record["readings"][0]), _PROVENANCE, 0.0)


def _subset(rows: list[tuple[AlphaScanReading, int]]) -> AlphaScanReading:
    """One reading of chosen sequences of several."""
    first = rows[0][0]
    return first.model_copy(
        update={
            "scored_tokens": [part.scored_tokens[row] for part, row in rows],
            "base_nats": [part.base_nats[row] for part, row in rows],
            "nats": [
                [[part.nats[block][a][row] for part, row in rows] for a in range(len(first.alphas))]
                for block in range(len(first.nats))
            ],
            "pass_tokens": len(rows),
        }
    )


_PROVENANCE = Provenance(
    model="benchmark",
    model_digest="",
    architecture="",
    dtype="",
    engine="local",
    torch_version="",
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    validation_digest="",
)
