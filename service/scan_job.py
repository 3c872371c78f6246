"""The alpha-scan as jobs for the runner: measured, judged with the clean profile, and made one where that is asked."""

from collections.abc import Sequence

from ..monitors.alpha_scan import AlphaScan, AlphaScanFinding, AlphaScanPlan, Strategy, alphas_of
from ..monitors.finding import Action, Finding
from ..monitors.wire import Gate, ModelFacts
from .baseline import Baseline, BaselineError
from .job import Job, Note, Outcome
from .live import Live
from .measuring import ScanError
from .mitigation_steps import LossUnavailable
from .records import ITSELF, ScanTrigger
from .replicas import worst
from .scan_measure import Measured, ScanMeasure
from .settings import ScanSettings
from .store import StoreError
from .validation_set import ValidationSetError
from .vllm import VllmError

Grid = str | list[float]


class Scans:
    """Makes the jobs of the alpha-scan."""

    def __init__(
        self, settings: ScanSettings, monitor: AlphaScan, measure: ScanMeasure, baseline: Baseline, live: Live
    ) -> None:
        self._grid: Grid = settings.grid
        self._monitor = monitor
        self._measure = measure
        self._baseline = baseline
        self._live = live

    def job(self, trigger: ScanTrigger, grid: Grid | None = None) -> Job:
        """A scan; without a grid, with that of the settings."""

        async def measure(note: Note) -> Outcome:
            return await self._scan(trigger, alphas_of(grid or self._grid), note)

        return Job(self._monitor.name, trigger, measure)

    async def order(self) -> tuple[ModelFacts, AlphaScanPlan]:
        """The model of now, and what a scan of it by the settings measures; raises what `ScanMeasure.order` raises."""
        return await self._measure.order(alphas_of(self._grid))

    async def loss(self, as_if: Sequence[Gate] = ()) -> float | None:
        """Loss in nats per scored token of the model as served now; None when it is not finite.

        `as_if` are gates in place of the served ones.  With several engines, that of the one that is worst off.  Parts
        keep to their budget, but nothing rests between them.  Raises `LossUnavailable` or `ProbeError`.
        """
        try:
            measured = await self._measure.measure(self._monitor, [], lambda *_: None, urgent=True, as_if=as_if)
        except (ScanError, VllmError, ValidationSetError) as error:
            raise LossUnavailable(str(error)) from error
        losses = []
        for one in measured:
            finding = self._monitor.judge(one.readings)
            if not finding.sequences:
                raise LossUnavailable("Nothing was measured.")
            if finding.base_loss_nats is None:
                return None
            losses.append(finding.base_loss_nats)
        return max(losses)

    async def _scan(self, trigger: ScanTrigger, grid: list[float], note: Note) -> Outcome:
        measured = await self._measure.measure(self._scanner(trigger), grid, note, fitting=self._baseline.fitting)
        judged = worst({one.engine: self._judge(one) for one in measured})
        # Replicas are alike: the profile of the first is that of all, if nothing is found in any.
        refusal = self._recorded(measured[0], judged) if trigger is ScanTrigger.BASELINE else None
        readings = [reading.model_dump(mode="json") for one in measured for reading in one.readings]
        return Outcome(self._as_offered(judged), readings, refusal)

    def _scanner(self, trigger: ScanTrigger) -> AlphaScan:
        """The monitor of the settings; for a profile it measures every block on every sequence."""
        if trigger is not ScanTrigger.BASELINE:
            return self._monitor
        return AlphaScan(self._monitor.thresholds, Strategy.PLAIN, self._monitor.max_faults)

    def _judge(self, measured: Measured) -> AlphaScanFinding:
        """With the clean profile where it fits; where it does not, the reason says so."""
        finding = self._monitor.judge(measured.readings, measured.profile)
        if self._baseline.misfit is None:
            return finding
        return finding.model_copy(
            update={"reason": f"{finding.reason}; the one that is kept does not fit: {self._baseline.misfit}"}
        )

    def _recorded(self, measured: Measured, finding: AlphaScanFinding) -> str | None:
        """Make the clean profile of this scan; why that cannot be, or None."""
        try:
            self._baseline.record(measured, finding, ITSELF)
        except (BaselineError, StoreError) as refusal:
            return str(refusal)
        return None

    def _as_offered(self, finding: AlphaScanFinding) -> Finding:
        """Suggest a skip only where the gates are known to act."""
        refusal = self._live.gates_refusal()
        if finding.action is not Action.SKIP or refusal is None:
            return finding
        return finding.model_copy(
            update={"action": Action.INVESTIGATE, "reason": f"{finding.reason}; no skip is offered: {refusal}"}
        )
