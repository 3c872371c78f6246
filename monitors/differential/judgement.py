"""The judgement of a differential reading.  See `judge`."""

from .facts import DifferentialReading
from .finding import DifferentialFinding
from .reference import Conditions, Recording, ReferenceKind


def judge(
    now: DifferentialReading,
    kind: ReferenceKind,
    recording: Recording | None,
    conditions: Conditions,
    limit: float | None = None,
) -> DifferentialFinding:
    """Judge one reading.

    Args:
        now: All ranks.
        kind: What it is held against.
        recording: The states of that; None for the checkpoint, whose states are in `now`.
        conditions: Of `now`.
        limit: Largest relative L2 distance of a block that is allowed; None: what noise explains.
    """
    raise NotImplementedError
