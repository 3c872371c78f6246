"""A second vLLM with the probe, a healthy replica or the other half of an A/B pair: its states are a reference."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..monitors.differential.facts import DifferentialPlan
from ..monitors.differential.reference import Recording
from ..monitors.wire import ModelFacts
from .differential_measure import read_states
from .duty import Duty
from .job import Note
from .live import Tally
from .measuring import Measurer, ScanError
from .probe import Probe, ProbeError, ProbeUnauthorised
from .recordings import conditions
from .settings import ScanSettings


class Peer:
    """The server behind `probe`.  What goes wrong there is a `ScanError` that says whose fault it is."""

    def __init__(self, probe: Probe, pacing: ScanSettings) -> None:
        self._probe = probe
        # Its engine is spared as ours is, and counted with nobody's.
        duty = Duty(pacing.duty, pacing.idle_duty)
        self._measurer = Measurer(pacing, Tally(), duty, probe, probe.facts)

    async def close(self) -> None:
        """Let go of the connection."""
        await self._probe.__aexit__(None, None, None)

    async def fitting(self, here: ModelFacts) -> ModelFacts:
        """The peer's facts; `ScanError` where its states say nothing about the model of `here`."""
        with self._told():
            there = await self._probe.facts()
        if there.scan_refusal is not None:
            raise ScanError(f"The peer at {self._probe.shown_url} cannot be measured: {there.scan_refusal}")
        for what, one, other in (
            ("version of Flipwatch", there.flipwatch_version, here.flipwatch_version),
            ("architecture", there.architecture, here.architecture),
            ("number of blocks", there.num_blocks, here.num_blocks),
        ):
            if one != other:
                raise ScanError(f"The peer at {self._probe.shown_url} has another {what}: {one}, not {other}.")
        return there

    async def record(self, there: ModelFacts, plan: DifferentialPlan, note: Note, at: float) -> tuple[Recording, int]:
        """States of the peer (of its first engine), taken now (`at`, epoch seconds), and how many steps that took."""
        with self._told():
            reading, steps = await read_states(self._measurer, plan, there, there.engines[0], note)
        return Recording(recorded_at=at, conditions=conditions(there), plan=plan, reading=reading), steps

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except ProbeUnauthorised:
            raise ScanError(
                f"The peer at {self._probe.shown_url} refused the token in differential.peer_token."
            ) from None
        except (ProbeError, ScanError) as error:
            raise ScanError(f"The peer at {self._probe.shown_url} cannot be measured: {error}") from error
