"""What the sidecar and the probe say to each other: JSON bodies of the probe's HTTP routes.

Routes, all under `/flipwatch/v1` on the vLLM server, all with the probe's own bearer token:

    GET    /model                       -> ModelFacts
    POST   /self-test                   -> SelfTest
    PUT    /gates            GateChange -> GateReport
    POST   /measurements  MeasureOrder  -> Progress
    POST   /measurements/{id}/advance  Advance -> Progress
    DELETE /measurements/{id}           -> 204
    POST   /faults          FaultOrder  -> Fault
    DELETE /faults/{id}                 -> 204
    GET    /integrity                   -> IntegrityFacts
    POST   /repairs        RepairOrder  -> RepairReport
    GET    /checkpoint                  -> CheckpointFacts
    POST   /checkpoint/digests  FileOrder -> FileDigest

A measurement is of a monitor of the table, or one of the procedures of `fingerprint`: `RECORD` takes a new baseline of
the bytes and reads `Recorded`, `COMPARE` holds the bytes against the checkpoint and reads `CheckpointReading`; both
take a `FingerprintPlan`, as a sweep does.  `CORRECT` makes the checkpoint's values the baseline of tensors, takes a
`CorrectionPlan` and reads `Corrected`.

Under data parallelism each engine has a replica of the model.  Gates are the same in all of them; what looks at the
bytes looks at all of them; what looks at the blocks looks at one at a time, which the order names.

Errors are problem+json (`Problem`).  401 bad token; 403 fault injection is off; 404 no such block, measurement,
fault or tensor; 409 another change is running, the gates have not passed their self-test, or a measurement is void
because the model changed under it; 422 wrong body; 501 this model or setting is not supported; 502 a rank failed or
the ranks disagree; 503 vLLM is starting, asleep, or paused by somebody else.
"""

from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .faults import FaultKind, FaultSpec
from .strict import Wire as Wire

PREFIX = "/flipwatch/v1"

ASLEEP = "Asleep"
"""Title of the problem that a server answers with while it sleeps or is paused: it stands still on purpose."""


class Problem(BaseModel):
    """RFC 9457 problem details."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str


class SelfTestState(StrEnum):
    """Outcome of the gates' self-test."""

    NOT_RUN = "not_run"
    PASSED = "passed"
    FAILED = "failed"


class SelfTest(Wire):
    """Do the gates act in the very code that serves?"""

    state: SelfTestState = Field(strict=False)
    reason: str


class FaultOrder(FaultSpec):
    """Damage one tensor of a block, or one outside the blocks, in memory only; undoable."""

    tensor: str
    """Name inside the block as the checkpoint or vLLM calls it, e.g. `mlp.up_proj` or `up_proj.weight`; without a
    block, of the embedding, the final norm or the head, e.g. `lm_head`, or a full name, e.g. as a search found it.
    `kv_cache` in a block means no weight but the keys and values that lie in its cache now: of requests that run, and
    of prompts that may be used again; any later change of the model clears all caches, and the fault with them."""
    block: int | None = Field(default=None, ge=0)
    """None: outside the blocks, or the full name says it."""
    source: str | None = None
    """Only for a stale page: the other tensor, named in the same way, in the same block or by its full name."""
    engine: int | None = Field(default=None, ge=0)
    """Under data parallelism the engine whose replica is damaged; None: all."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.source is not None) != (self.kind is FaultKind.STALE):
            raise ValueError("kind stale needs a source, the tensor that the page comes from, and no other takes one")
        return self


class Fault(FaultOrder):
    """A fault that stands now: what was ordered, but `count` is how many values it damaged."""

    id: str
    tensor: str
    """The live parameter's full name."""
    source: str | None = None
    """As `tensor`."""
    shared_with: list[str]
    """Other names of the same memory, damaged as well: a head that is tied to the embedding."""


class ModelFacts(Wire):
    """The live model as the probe sees it now, the same on all ranks."""

    boot_id: str
    """New for every start of vLLM: a change means that the server, or any of its engines, was restarted."""
    model: str
    architecture: str
    layer_class: str
    num_blocks: int
    armed: bool
    """Gates are installed."""
    refusal: str | None
    """Why gates are not installed, one sentence; None when armed."""
    scan_refusal: str | None
    """Why this model cannot be scanned, one sentence; None when it can."""
    model_digest: str | None
    """Hex digest of a sample of the weights as they were loaded, of one replica; damage afterwards does not change it,
    and replicas that were loaded differently have one that fits no clean model.  None: not armed, or the weights could
    not be read (vLLM's log says why)."""
    mode: str
    """`eager` or `compiled`."""
    dtype: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    engines: list[int] = Field(default=[0], min_length=1)
    """Data-parallel index of each engine that this server answers for."""
    max_tokens: int
    """Longest sequence that a plan may hold."""
    gates: list[float]
    """Alpha per block, read back from the device."""
    self_test: SelfTest
    faults_enabled: bool
    faults: list[Fault]
    flipwatch_version: str
    vllm_version: str
    torch_version: str
    hardware: str
    """What computes: the GPU's name, or the CPU's instruction set and model."""


class Gate(Wire):
    """One block and its alpha."""

    block: int = Field(ge=0)
    alpha: float = Field(ge=0.0, le=2.0)


class GateChange(Wire):
    """All or nothing.  `boot_id` guards against writing to a server that was restarted meanwhile."""

    boot_id: str
    gates: list[Gate] = Field(min_length=1)


class GateReport(Wire):
    """What a change of gates came to."""

    gates: list[float]
    """All gates as read back from every rank after the write."""
    paused_seconds: float


class MeasureOrder(Wire):
    """Begin a measurement; `plan` is what the monitor of that name takes."""

    monitor: str
    plan: dict[str, Any]
    engine: int | None = None
    """The one that is measured.  None: all; monitors of blocks need one where there are several."""
    as_if: list[Gate] = Field(default=[])
    """Gates that the measured model has in place of the served ones; only for the alpha-scan."""


class Advance(Wire):
    """Go on by so many units of work."""

    steps: int = Field(ge=1)
    patience_seconds: float = Field(default=0.0, ge=0.0, le=60.0)
    """Wait so long at most for a moment in which no request waits for its first token."""


class Progress(Wire):
    """How far a measurement is."""

    id: str
    steps_done: int
    steps_total: int
    seconds: float
    """Time that the engine was held by this call (slowest rank)."""
    dearest_seconds: float = 0.0
    """Of that, by the step that took longest."""
    requests: int | None = None
    """Requests that were not finished while it was held; None: not known."""
    reading: dict[str, Any] | None
    """The monitor's reading once the measurement is complete."""
