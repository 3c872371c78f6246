"""The recorded states that the model is held against: whose they are, how they are kept, what must not become one."""

import math
from collections.abc import Callable

import structlog
from pydantic import ValidationError

from ..monitors.differential.divergence import decode
from ..monitors.differential.facts import STREAM, DifferentialReading
from ..monitors.differential.reference import Conditions, Recording
from ..monitors.wire import ModelFacts
from .records import Event
from .store import Store

_log = structlog.get_logger(__name__)


class Recordings:
    """The one recording, or none.  It outlives a restart of the sidecar and of vLLM."""

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self.current: Recording | None = _stored(store)

    @property
    def recorded_at(self) -> float | None:
        """Epoch seconds; None when there is none."""
        return None if self.current is None else self.current.recorded_at

    def keep(self, recording: Recording, actor: str) -> None:
        """Hold the model against these states from now on; raises `StoreError`."""
        self._set(recording, actor, "states recorded")

    def remove(self, actor: str) -> None:
        """Forget the states; raises `StoreError`."""
        self._set(None, actor, "states removed")

    def _set(self, recording: Recording | None, actor: str, what: str) -> None:
        shown = recording or self.current
        detail = {} if shown is None else {"recorded_at": shown.recorded_at, **shown.conditions.model_dump()}
        self._store.set_recording(recording, Event(at=self._now(), actor=actor, what=what, detail=detail))
        self.current = recording


def _stored(store: Store) -> Recording | None:
    try:
        return store.recording()
    except ValidationError as error:
        # Another version of Flipwatch may have recorded other facts; they would fit nothing that is measured now.
        _log.warning("recorded states cannot be read, record them again", errors=error.error_count())
        return None


def conditions(facts: ModelFacts) -> Conditions:
    """Under which a reading of this model is made."""
    return Conditions(
        model=facts.model,
        model_digest=facts.model_digest,
        architecture=facts.architecture,
        num_blocks=facts.num_blocks,
        dtype=facts.dtype,
        engine=f"vllm {facts.vllm_version} {facts.mode}",
        torch_version=facts.torch_version,
        hardware=facts.hardware,
        tensor_parallel_size=facts.tensor_parallel_size,
        flipwatch_version=facts.flipwatch_version,
    )


def not_finite(reading: DifferentialReading, size: int) -> str | None:
    """Which states are not finite, so that nothing could be held against them, one sentence; None when all are.

    `size` is the K of the plan.  Raises `ValueError` for a sketch that cannot be decoded.
    """
    losses = [rank.nats for rank in reading.ranks]
    if not any(nats and None not in nats for nats in losses):
        return "The loss of the model is not finite on all sequences: find out why, then record."
    for rank in reading.ranks:
        for states in rank.isolated:
            rows = [decode(point.sketch, size) for point in states.points if point.module == STREAM]
            if not rows or not all(math.isfinite(value) for row in rows[0] for value in row):
                return f"Block {states.block} puts out values that are not finite: find out why, then record."
    return None
