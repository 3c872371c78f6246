"""One reading of those of all ranks."""

from collections.abc import Sequence
from typing import Any

from ..monitors.differential.facts import DifferentialReading
from ..monitors.differential.monitor import Differential
from ..monitors.fingerprint.facts import (
    COMPARE,
    CORRECT,
    RECORD,
    CheckpointReading,
    Corrected,
    FingerprintReading,
    Recorded,
)
from ..monitors.fingerprint.monitor import Fingerprint


def join(name: str, readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The reading of a measurement, given what each rank read, in the order of the ranks.

    What looks at the bytes reads others on each rank.  Monitors of blocks work in step and read the same; where the
    logits reach the first rank only, its reading is the one that has losses.
    """
    ranks = [rank for reading in readings for rank in reading.get("ranks", ())]
    if name == Fingerprint.name:
        return FingerprintReading.model_validate({"ranks": ranks}).model_dump(mode="json")
    if name == COMPARE:
        return CheckpointReading.model_validate({"ranks": ranks}).model_dump(mode="json")
    if name == CORRECT:
        return Corrected.model_validate({"ranks": ranks}).model_dump(mode="json")
    if name == RECORD:
        changed = sum(reading["changed_chunks"] for reading in readings)
        return Recorded.model_validate({"ranks": ranks, "changed_chunks": changed}).model_dump(mode="json")
    if name == Differential.name:
        return DifferentialReading.model_validate({**readings[0], "ranks": ranks}).model_dump(mode="json")
    return readings[0]
