"""Bodies of the API.  Requests are strict and closed: `{"block": false}` is not block 0."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..monitors.canary.pulse import Pulse
from ..monitors.differential.facts import NAME as DIFFERENTIAL
from ..monitors.differential.reference import Conditions, ReferenceKind
from ..monitors.finding import Action, Health
from ..monitors.fingerprint.facts import SealFacts
from ..monitors.fingerprint.judgement import CheckpointVerdict
from ..monitors.verdict.verdict import Joined
from ..monitors.wire import ModelFacts
from .records import ScanRecord
from .settings import Scope

Alpha = Annotated[float, Field(ge=0.0, le=2.0)]
Block = Annotated[int, Field(ge=0)]


class Order(BaseModel):
    """What somebody asks for."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class View(BaseModel):
    """What the API shows."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ScanOrder(Order):
    """A scan to run now."""

    monitor: Literal["alpha_scan", "fingerprint", "differential", "canary"] = "alpha_scan"
    grid: Literal["quick", "full"] | Annotated[list[Alpha], Field(min_length=1, max_length=32)] | None = Field(
        default=None, description="Alphas other than 1, each once; without it the grid of the settings."
    )
    reference: Annotated[ReferenceKind, Field(strict=False)] | None = Field(
        default=None, description="What the differential monitor compares with; without it that of the settings."
    )

    @field_validator("grid")
    @classmethod
    def _each_alpha_once(cls, grid: str | list[float] | None) -> str | list[float] | None:
        if isinstance(grid, list) and (1.0 in grid or len(set(grid)) != len(grid)):
            raise ValueError("name each alpha once and leave 1 out: it is always measured")
        return grid

    @model_validator(mode="after")
    def _each_monitor_has_its_own(self) -> "ScanOrder":
        if self.monitor != "alpha_scan" and self.grid is not None:
            raise ValueError(f"a scan of the monitor {self.monitor} has no grid: leave it out")
        if self.monitor != DIFFERENTIAL and self.reference is not None:
            raise ValueError(f"only the monitor {DIFFERENTIAL} has a reference: leave it out, or name that monitor")
        return self


class RecordOrder(Order):
    """A change of the weights that somebody made on purpose."""

    reason: str = Field(min_length=1, max_length=500, description="What was changed: it is kept in the audit log.")


class CorrectionOrder(Order):
    """Tensors that were wrong when the baseline was taken, as a comparison with the checkpoint says."""

    tensors: list[Annotated[str, Field(min_length=1, max_length=500)]] = Field(
        min_length=1, max_length=100, description="Full names, each once, as a finding of the differential monitor has."
    )
    reason: str = Field(min_length=1, max_length=500, description="Why: it is kept in the audit log.")

    @field_validator("tensors")
    @classmethod
    def _each_once(cls, tensors: list[str]) -> list[str]:
        if len(set(tensors)) != len(tensors):
            raise ValueError("name each tensor once")
        return tensors


class IntegrityView(View):
    """What is known about the bytes of the served model."""

    boot_id: str
    refusal: str | None = Field(description="Why there are no baselines, one sentence.")
    ranks: list[SealFacts] = Field(description="The baselines of now.")
    verdict: CheckpointVerdict | None = Field(
        description="The last check of the checkpoint of this vLLM process; null when there was none."
    )
    verified: bool | None = Field(description="Whether that check found nothing wrong.")
    summary: str = Field(description="What it came to, one sentence.")


class RecordingView(View):
    """The recorded states, without the states."""

    recorded_at: float = Field(description="Epoch seconds.")
    conditions: Conditions = Field(description="Whose states they are.")
    sequences: int = Field(description="Token sequences that went through the model.")
    tokens: int = Field(description="Tokens of all of them.")
    prefix: int = Field(description="Tokens that each block is run on alone.")


class ExpectationView(View):
    """The recorded answers."""

    recorded_at: float = Field(description="Epoch seconds.")
    conditions: Conditions = Field(description="Whose answers they are.")
    prompts: int
    tokens: list[int] = Field(description="So many tokens of each answer are compared.")
    runs: int = Field(description="So many times all prompts were asked.")
    scatter: float = Field(description="The largest |change of log p| / (1 - p) between these runs.")
    tolerance: float = Field(description="The scatter that is allowed.")
    misfit: str | None = Field(description="Why they cannot be used for the model of now, half a sentence.")


class MitigationOrder(Order):
    """A change of the served model."""

    action: Literal["skip", "attenuate", "repair", "drain"]
    blocks: Annotated[list[Block], Field(min_length=1, max_length=1000)] | Literal["flagged"] | None = Field(
        default=None,
        description="Zero-based blocks, each once, or `flagged`: those that the last finding flags. A repair without "
        "them puts right whatever has changed; a drain takes none.",
    )
    alpha: Alpha | None = Field(default=None, description="Needed by attenuate, where it is above 0 and not 1.")
    reason: str = Field(default="", max_length=500)
    force: bool = Field(default=False, description="Do it even if the last scan says that the loss would rise.")

    @model_validator(mode="after")
    def _check_action(self) -> Self:
        if self.action == "repair" and (self.alpha is not None or self.force):
            raise ValueError("a repair takes neither alpha nor force")
        if self.action == "drain" and (self.blocks is not None or self.alpha is not None or self.force):
            raise ValueError("a drain takes neither blocks nor alpha nor force: it touches nothing")
        if self.action in ("skip", "attenuate") and self.blocks is None:
            raise ValueError(f"{self.action} needs blocks: their numbers, or flagged")
        return self


class Accepted(View):
    """A background action was started; its state is at `Location`."""

    id: str
    state: str


class NotificationOutcome(View):
    """What came of a notification of Alertmanager."""

    outcome: str = Field(description="What is done, or why nothing is to be done, one sentence.")
    mitigation_id: str | None = Field(default=None, description="What was ordered; its state is at `Location`.")


class ScanView(ScanRecord):
    """A scan with its finding."""

    finding: dict[str, Any] | None = None
    """As the monitor judged it; `unknown` when the scan failed; None while it runs."""


class StateView(View):
    """Health of what one monitor watches."""

    monitor: str
    health: Health
    reason: str
    at: float | None = Field(description="Epoch seconds of the finding that this rests on.")
    action: Action
    flagged: list[int]
    finding_id: str | None


class MitigationOffer(View):
    """Whether mitigations can be asked for."""

    mode: str
    offered: bool
    reason: str | None = Field(description="Why not, one sentence.")


class PulseView(View):
    """Whether vLLM moves, by its own counters."""

    pulse: Pulse
    reason: str


class AlertView(View):
    """An alert that fires."""

    name: str
    monitor: str = Field(description="Whose findings made it fire.")
    block: int | None
    since: float
    summary: str
    description: str


class StatesView(View):
    """The whole picture in one answer."""

    verdict: Joined = Field(description="What all evidence together says, why, and what to do.")
    up: bool = Field(description="The probe inside vLLM answers.")
    away: str | None = Field(description="Why it does not, one sentence.")
    model_name: str | None
    boot_id: str | None = Field(description="Changes when vLLM is restarted.")
    gates: list[float] | None = Field(
        description="Alpha of each block as served now; null while vLLM is away or has no gates."
    )
    scanning: bool
    last_scan_at: float | None
    pulse: PulseView
    mitigation: MitigationOffer
    automation: str = Field(description="What automation decided last and why, or that it is off, one sentence.")
    profile: str = Field(description="Whether scans are judged with a clean profile, one sentence.")
    states: list[StateView]
    alerts: list[AlertView]


class BlockView(View):
    """One block: its gate now, and its scores in the last finding.  Null: not known."""

    block: int
    gate: float | None
    mitigation_id: str | None = Field(description="The open mitigation that holds it.")
    flagged: bool | None
    loss_without_nats: float | None = Field(
        default=None, description="Mean loss with this block left out, as the last scan measured it."
    )
    bss: float | None = None
    slope: float | None = None
    skip_gain: float | None = None
    largest_deviation: float | None = None
    bss_z: float | None = None
    slope_z: float | None = None
    skip_gain_z: float | None = None
    largest_deviation_z: float | None = None
    bss_profile_z: float | None = Field(default=None, description="Against the block's own value in the clean profile.")
    slope_profile_z: float | None = None
    skip_gain_profile_z: float | None = None
    largest_deviation_profile_z: float | None = None
    skip_gain_t: float | None = Field(default=None, description="Skip gain over its standard error.")
    without_drift_nats: float | None = Field(
        default=None,
        description="Loss with the block left out above that of the clean profile; near 0 for the one damaged block.",
    )
    curve: list[tuple[float, float | None]] = Field(default=[], description="(alpha, mean loss in nats) as measured.")


class CallerView(View):
    """Whose token the request carries."""

    name: str
    scopes: list[Scope]


class InfoView(View):
    """What runs here, for people and for `flipwatch doctor`."""

    flipwatch_version: str
    python_version: str
    caller: CallerView
    settings: dict[str, Any] = Field(description="Without secrets.")
    probe: ModelFacts | None = Field(description="What the probe said last; null before the first answer.")


class CheckView(View):
    """One line of /readyz."""

    name: str
    ok: bool
    required: bool
    detail: str


class ReadyView(View):
    """The sidecar can do its work.  Whether vLLM is there is listed, and does not count; a drain counts."""

    status: Literal["ready"]
    checks: list[CheckView]


class LiveView(View):
    """The process answers."""

    status: Literal["alive"]
