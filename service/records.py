"""What the sidecar remembers: scans, findings, mitigations and the audit log.  Times are UTC epoch seconds."""

from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from ..monitors.finding import Health
from ..monitors.fingerprint.facts import ChunkRepair
from ..monitors.wire import Gate

ITSELF = "flipwatch"
"""The actor of what nobody asked for."""


class Record(BaseModel):
    """Frozen and closed.  A number that is not finite is refused here: it is said by a state, never by NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ScanState(StrEnum):
    """Where a scan is.  `failed` means that the scan could not be done, not that it found something."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class ScanTrigger(StrEnum):
    """Why a scan ran: the clock, the count of served requests, somebody asked, a mitigation wanted proof, another
    monitor saw something that this one has not looked for yet, or a clean profile, a new baseline or a recording of
    states is to be made."""

    SCHEDULE = "schedule"
    REQUESTS = "requests"
    REQUEST = "request"
    VERIFICATION = "verification"
    EVIDENCE = "evidence"
    BASELINE = "baseline"


class ScanRecord(Record):
    """One scan, done or not."""

    id: str
    monitor: str
    state: ScanState
    trigger: ScanTrigger
    created_at: float
    finished_at: float | None = None
    steps_done: int = 0
    steps_total: int | None = None
    """None until the probe has told."""
    finding_id: str | None = None
    error: str | None = None
    """Why the scan failed, one sentence."""
    profile_refusal: str | None = None
    """Why no clean profile was made of it, though that was asked for, one sentence."""
    recording_refusal: str | None = None
    """Why no states were kept, though that was asked for, one sentence."""


class FindingRecord(Record):
    """One finding as it was judged."""

    id: str
    scan_id: str
    monitor: str
    created_at: float
    health: Health
    body: dict[str, Any]
    """The finding as pydantic dumped it (`model_dump(mode="json")`)."""
    boot_id: str | None = None
    """The vLLM process that it is about; None before the first one has answered."""


class Mode(StrEnum):
    """How far mitigation may go: look only, say what it would do, or do it."""

    OBSERVE = "observe"
    DRY_RUN = "dry-run"
    ENFORCE = "enforce"


class MitigationAction(StrEnum):
    """Leave the blocks out (alpha 0), scale their contribution by alpha, put the bytes of their weights right, or call
    the server not ready."""

    SKIP = "skip"
    ATTENUATE = "attenuate"
    REPAIR = "repair"
    DRAIN = "drain"


class MitigationState(StrEnum):
    """Where a mitigation is.

    pending -> applying -> verifying -> active -> reverting -> reverted, with `failed` (the gates are as before, or the
    message says how they are), `dry_run` (nothing was touched) and `interrupted` (it broke off in between, or
    somebody else changed the gates) beside the path.  A repair ends as `repaired` instead of `active`: nothing of it
    is left to be undone.  A drain is `active` at once.
    """

    PENDING = "pending"
    APPLYING = "applying"
    VERIFYING = "verifying"
    ACTIVE = "active"
    REPAIRED = "repaired"
    FAILED = "failed"
    REVERTING = "reverting"
    REVERTED = "reverted"
    DRY_RUN = "dry_run"
    INTERRUPTED = "interrupted"


IN_FLIGHT = frozenset(
    {
        MitigationState.PENDING,
        MitigationState.APPLYING,
        MitigationState.VERIFYING,
        MitigationState.REVERTING,
    }
)
"""States that only a running sidecar can carry on; found while it carries on nothing, they were interrupted."""


class LossState(StrEnum):
    """What a loss of None means."""

    NOT_MEASURED = "not_measured"
    FINITE = "finite"
    NOT_FINITE = "not_finite"


class MitigationRecord(Record):
    """One change of the served model, asked for by somebody or taken by Flipwatch itself."""

    id: str
    action: MitigationAction
    blocks: tuple[int, ...]
    """Of a repair: those with changed bytes, none where all of them lie outside the blocks; and those whose skip it
    shall end.  None of a drain."""
    alpha: float | None
    """What the blocks' gates are set to; 0 for a skip, None for a repair and a drain."""
    reason: str
    actor: str
    automatic: bool
    rule: str | None = None
    """The rule of the policy that asked for it; None when a person did."""
    forced: bool = False
    """Somebody asked for it although the last scan said that the loss would rise."""
    mode: Mode
    state: MitigationState
    loss_before: float | None = None
    """Nats per scored token on the validation set; None as `loss_before_state` tells."""
    loss_before_state: LossState = LossState.NOT_MEASURED
    loss_after: float | None = None
    loss_after_state: LossState = LossState.NOT_MEASURED
    gates_before: tuple[Gate, ...]
    """The touched blocks' gates before the change."""
    paused_seconds: float | None = None
    """How long the engine stood still for the last write; None before the first."""
    repairs: tuple[ChunkRepair, ...] = ()
    """The chunks of a repair: as they were found, then as the probe and a fresh look say."""
    undone_by: str | None = None
    """Who took it back, `flipwatch` itself or a person; None unless it was, also where a repair ended it."""
    boot_id: str
    """The vLLM process that was changed."""
    created_at: float
    updated_at: float
    message: str
    """One sentence with the numbers in it."""

    @property
    def gates_wanted(self) -> tuple[Gate, ...]:
        """The touched blocks' gates while this is in effect; none for a repair or a drain."""
        return () if self.alpha is None else tuple(Gate(block=block, alpha=self.alpha) for block in self.blocks)

    @property
    def held(self) -> tuple[int, ...]:
        """Blocks whose gates belong to this record while it is open; none for a repair or a drain."""
        return () if self.alpha is None else self.blocks


class Mandate(NamedTuple):
    """With what a rule of the policy orders a mitigation, where no person does."""

    rule: str
    boot_id: str
    """The vLLM process that the verdict was about: no other one may be changed for it."""
    dry_run: bool = False
    """The rule only says what it would do."""


class Event(Record):
    """One line of the audit log."""

    at: float
    actor: str
    what: str
    detail: dict[str, Any]


ARRIVED = "vllm arrived"
"""What the audit log says when a vLLM process answers for the first time; `detail` has its `boot_id`."""
