"""What the sidecar knows right now: the served model, the state of each monitor, its own counts."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..monitors.alpha_scan import AlphaScan, AlphaScanFinding
from ..monitors.canary.finding import NAME as CANARY
from ..monitors.canary.finding import CanaryFinding
from ..monitors.canary.pulse import Beat, Pulse
from ..monitors.differential.facts import NAME as DIFFERENTIAL
from ..monitors.differential.finding import DifferentialFinding
from ..monitors.finding import Finding, Health
from ..monitors.fingerprint.facts import FingerprintReading, IntegrityFacts
from ..monitors.fingerprint.judgement import NAME as FINGERPRINT
from ..monitors.fingerprint.judgement import CheckpointVerdict, FingerprintFinding
from ..monitors.verdict.evidence import Heard, Seen
from ..monitors.verdict.join import join
from ..monitors.verdict.verdict import Joined
from ..monitors.wire import ModelFacts, SelfTestState

F = TypeVar("F", bound=Finding)

# A finding counts for so many intervals of the clock.
_OLD = 3

_NO_BEAT = Beat(Pulse.UNKNOWN, "vLLM's counters have not been read yet.")


@dataclass(frozen=True)
class MonitorState:
    """Health of what one monitor watches, and the finding it rests on."""

    monitor: str
    health: Health
    reason: str
    at: float | None = None
    """Epoch seconds of the finding; None when there is none."""
    finding: Finding | None = None
    finding_id: str | None = None
    began: float = 0.0
    """Epoch seconds at which the measurement began."""
    since: float = 0.0
    """Epoch seconds of the first finding that said the same, without another one in between."""

    def same(self, finding: Finding) -> bool:
        """Does that finding say the same about the same blocks?"""
        return (
            self.finding is not None
            and self.finding.health is finding.health
            and {place.block for place in self.finding.places} == {place.block for place in finding.places}
        )


@dataclass
class Tally:
    """What one monitor's scans came to since the start of this process."""

    started: int = 0
    failures: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    parts: int = 0
    held_seconds: float = 0.0
    """Time for which its parts held the engine."""
    last_at: float | None = None
    """Epoch seconds at which the last scan that gave a reading ended."""
    last_seconds: float | None = None


@dataclass
class Integrity:
    """What is known about the bytes of the vLLM process of now."""

    facts: IntegrityFacts | None = None
    """The baselines as last heard."""
    reading: FingerprintReading | None = None
    """The last sweep."""
    verdict: CheckpointVerdict | None = None
    """The last check of the checkpoint; may be of an earlier process until the first look at this one."""


@dataclass
class Live:
    """The state that routes, metrics and page show.  Written by the runner, its jobs, the watcher and the scheduler."""

    monitors: tuple[str, ...]
    """Those that run by themselves.  Others are shown once they have found something."""
    every_minutes: Mapping[str, float | None] = field(default_factory=dict)
    """Monitor -> time from one scan by the clock to the next; None when there are none."""
    now: Callable[[], float] = time.time
    """Epoch seconds."""
    facts: ModelFacts | None = None
    """As last heard; None before the first answer."""
    model_name: str | None = None
    """The name under which vLLM serves the model."""
    up: bool = False
    away: str = "The probe has not answered yet."
    """Why the probe does not answer, one sentence; counts only while it is not up."""
    silent: bool = False
    """Whether it was asked and gave no answer at all, as one in a vLLM that hangs; counts only while it is not up."""
    away_since: float = 0.0
    """Epoch seconds."""
    beat: Beat = _NO_BEAT
    """Whether vLLM moves, by its own counters; they are there without the probe."""
    restarts_seen: int = 0
    integrity: Integrity = field(default_factory=Integrity)
    regated_at: float = 0.0
    """Epoch seconds at which the gates were last seen to have changed."""
    repaired_at: float = 0.0
    """Epoch seconds at which the last repair ended."""

    _states: dict[str, MonitorState] = field(default_factory=dict)
    _tallies: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def tally(self, monitor: str) -> Tally:
        """What the monitor's scans came to."""
        return self._tallies[monitor]

    def state(self, monitor: str) -> MonitorState:
        """The monitor's state; unknown while the probe is away or the finding is old, whatever was found before.

        The canary does not need the probe: what it has found since the probe went away counts.
        """
        known = self._states.get(monitor) or MonitorState(
            monitor, Health.UNKNOWN, "No scan has finished since the sidecar was started."
        )
        by_itself = monitor == CANARY and known.at is not None and known.at >= self.away_since
        if not self.up and not by_itself:
            return MonitorState(monitor, Health.UNKNOWN, self.away, known.at)
        every = self.every_minutes.get(monitor)
        if known.health is not Health.UNKNOWN and known.at is not None and every is not None:
            # A scan that takes longer than the interval is none that is missing.
            between = max(every, (self.tally(monitor).last_seconds or 0.0) / 60.0)
            age = (self.now() - known.at) / 60.0
            if age > _OLD * between:
                reason = f"The last finding is {age:.0f} minutes old, though a scan is due every {between:g}."
                return MonitorState(monitor, Health.UNKNOWN, reason, known.at)
        return known

    def states(self) -> list[MonitorState]:
        """The states of all monitors that run by themselves, and of those that were asked for."""
        asked_for = [monitor for monitor in self._states if monitor not in self.monitors]
        return [self.state(monitor) for monitor in (*self.monitors, *asked_for)]

    def state_in(self, boot_id: str, monitor: str) -> MonitorState | None:
        """The monitor's state, if it is about the vLLM process of this boot id."""
        return self.state(monitor) if self.facts is not None and self.facts.boot_id == boot_id else None

    def verdict(self) -> Joined:
        """All evidence of now, joined."""
        gates = self.facts.gates if self.up and self.facts is not None else None
        return join(
            Heard(
                fingerprint=self._seen(FINGERPRINT, FingerprintFinding, self.repaired_at),
                scan=self._seen(AlphaScan.name, AlphaScanFinding, self._changed_at),
                differential=self._seen(DIFFERENTIAL, DifferentialFinding, self._changed_at),
                canary=self._seen(CANARY, CanaryFinding, self._changed_at),
                beat=self.beat,
                gates=None if gates is None else tuple(gates),
            )
        )

    def found(self, finding: Finding, finding_id: str, at: float, began: float | None = None) -> None:
        """A monitor has a new finding, whose measurement ended `at`, epoch seconds.

        One that runs only when somebody asks has told who asked that nothing can be told: that is no state to keep.
        """
        if finding.health is Health.UNKNOWN and finding.monitor not in self.monitors:
            return
        before = self._states.get(finding.monitor)
        since = before.since if before is not None and before.same(finding) else at
        self._states[finding.monitor] = MonitorState(
            finding.monitor,
            finding.health,
            finding.reason,
            at,
            finding,
            finding_id,
            at if began is None else began,
            since,
        )

    def lost(self, why: str, *, silent: bool = False) -> None:
        """The probe does not answer; `silent`: nor does anybody in its place."""
        if self.up:
            self.away_since = self.now()
        self.up = False
        self.away = why
        self.silent = silent

    def restarted(self) -> None:
        """vLLM is a new process: what was found in the old one says nothing about it."""
        self.restarts_seen += 1
        self.integrity = Integrity()
        self._states = {
            monitor: MonitorState(monitor, Health.UNKNOWN, "vLLM was restarted and has not been scanned since.")
            for monitor in self.monitors
        }

    def outdated(self, monitor: str) -> bool:
        """Was the model mitigated or repaired after the monitor's last measurement had begun?"""
        return self.state(monitor).began < self._changed_at

    def gates_refusal(self) -> str | None:
        """Why no mitigation can be offered, one sentence; None when the gates are known to act."""
        if not self.up or self.facts is None:
            return self.away
        if not self.facts.armed:
            return f"Gates are not installed: {self.facts.refusal or 'the probe gave no reason.'}"
        if self.facts.self_test.state is not SelfTestState.PASSED:
            state = self.facts.self_test.state.value.replace("_", " ")
            return f"The self-test of the gates: {state}. {self.facts.self_test.reason}"
        return None

    @property
    def _changed_at(self) -> float:
        """When something was last done to the model on purpose: what was found before is not about this one."""
        return max(self.regated_at, self.repaired_at)

    def _seen(self, monitor: str, kind: type[F], changed_at: float) -> Seen[F]:
        state = self.state(monitor)
        if not isinstance(state.finding, kind):
            return Seen(None, state.reason)
        if state.began < changed_at:
            return Seen(None, "The model was mitigated or repaired since, and has not been measured again.")
        return Seen(state.finding, began=state.began, since=state.since)
