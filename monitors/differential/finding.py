"""The judgement of the differential monitor, with every number it rests on."""

from pydantic import BaseModel, ConfigDict, Field

from ..finding import Finding
from ..fingerprint.diagnosis import Diagnosis
from .reference import ReferenceKind


class BlockDivergence(BaseModel):
    """How far one block lies from its reference.  A number that is not finite is None, and `reason` says so."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    block: int
    gate: float
    """Alpha as served; run alone, a block is taken at 1."""
    l2: float | None
    """Relative L2 distance of its output from the reference's on the same input, the largest of the tokens."""
    cosine: float | None
    """1 - cosine similarity, the largest of the tokens."""
    allowed: float | None
    """The relative L2 distance that noise explains; None where no noise is known."""
    departs: bool | None
    """Further away than allowed, or not finite where the reference is; None: cannot be told."""
    walk_l2: float | None
    """As served, behind all blocks in front of it: what arrives here of their divergences, too."""
    walk_cosine: float | None
    reason: str
    """One sentence with the numbers."""


class Location(BaseModel):
    """How far down a fault was followed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block: int
    sublayer: str | None
    """The first child of the block whose output departs."""
    module: str | None
    """The first module inside it, or the one that has the tensor."""
    tensor: str | None
    """Full name, where the reference is the checkpoint."""
    parts: tuple[str, ...]
    """Of a packed projection: which of its parts."""
    diagnosis: Diagnosis | None
    """Elements and bits."""
    comparisons: int
    """Tensor-level comparisons that led here: one for each block, those of the sublayers, one of the tensor."""
    sentence: str
    """Without the full stop."""


class Effort(BaseModel):
    """What the descent took in all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks: int
    """Comparisons of block outputs."""
    sublayers: int
    """Of outputs of modules inside blocks."""
    digests: int
    """Pairs of digests of tensors."""
    tensors: int
    """Tensors value by value."""
    brute_force: int
    """Tensors of all blocks, which a comparison without a descent would take one by one; 0 where not known."""


class DifferentialFinding(Finding):
    """All blocks against their reference."""

    reference: ReferenceKind
    recorded_at: float | None
    """Of the recording, epoch seconds; None for the checkpoint."""
    blocks: tuple[BlockDivergence, ...]
    first_jump: int | None
    """The block at which the walk first jumps away, by the first difference of its divergence; None: nowhere."""
    locations: tuple[Location, ...]
    effort: Effort
    nats: float | None
    """Mean loss now, as served; None where it is not finite or was not measured."""
    reference_nats: float | None
    not_comparable: tuple[str, ...] = Field(default=())
    """What the reference has no value for, a sentence each."""
