"""What is said about the bytes of a served model: JSON that crosses from the probe to the sidecar."""

from collections.abc import Iterable
from enum import StrEnum

from pydantic import Field

from ..strict import Wire
from .diagnosis import Diagnosis

RECORD = "fingerprint-record"
"""A measurement that takes a new baseline of what lies in memory now."""
COMPARE = "fingerprint-checkpoint"
"""A measurement that holds memory against the checkpoint; costs reading it, block by block."""

CORRECT = "fingerprint-correct"
"""A measurement that makes the checkpoint's values of some tensors their baseline; memory is not touched."""


class Rank(Wire):
    """One worker process of a vLLM server."""

    rank: int
    """Among all workers that answer, of all engines."""
    data: int = 0
    """Data-parallel index of its engine; pipeline and tensor are its ranks in these."""
    pipeline: int = 0
    tensor: int = 0

    def __str__(self) -> str:
        """For people; the engine is named where there must be several."""
        return f"rank {self.rank} (engine {self.data})" if self.data else f"rank {self.rank}"


class NotCovered(Wire):
    """A tensor that no digest can see."""

    tensor: str
    bytes: int | None
    """How large it should be; None where that is not known."""
    reason: str


class ParityPlace(StrEnum):
    """Where the parity is kept."""

    MEMORY = "memory"
    FILE = "file"
    NONE = "none"


class SealFacts(Wire):
    """One rank's baseline: what was recorded, when, and of what."""

    rank: Rank
    device: str
    digest: str
    """Name of the digest: `gmac` or `multilinear`."""
    recorded_at: float
    """Epoch seconds."""
    chunk_bytes: int
    chunks: int
    tensors: int
    covered_bytes: int
    not_covered: list[NotCovered]
    parity: ParityPlace = Field(strict=False)
    parity_bytes: int
    parity_groups: int
    suspicions: list[str]
    """What was wrong with the values when they were recorded (not finite, absurdly large), a sentence each."""


class IntegrityFacts(Wire):
    """The baselines of all ranks."""

    boot_id: str
    refusal: str | None
    """Why there are none, one sentence."""
    ranks: list[SealFacts]

    @property
    def steps(self) -> int:
        """In how many steps a sweep is best cut: a chunk each, of the rank that holds most."""
        return max([1, *(seal.chunks for seal in self.ranks)])


class Piece(Wire):
    """The part of a chunk that lies in one tensor."""

    tensor: str
    """Full name in the model."""
    block: int | None
    """None: outside the blocks."""
    start: int
    """First byte in the tensor's memory."""
    stop: int
    """Behind the last one."""


def blocks_of(pieces: Iterable[Piece]) -> set[int]:
    """The blocks that pieces lie in."""
    return {piece.block for piece in pieces if piece.block is not None}


class BadChunk(Wire):
    """A chunk whose bytes are not those of the baseline."""

    chunk: int
    pieces: list[Piece]
    diagnoses: list[Diagnosis]
    """What changed, from the bytes that parity gives back; empty where they cannot be had or were not asked for."""
    unrepairable: str | None
    """Why parity cannot put it right, one sentence; None when it can."""


class RankReading(Wire):
    """One rank's bytes against its baseline."""

    rank: Rank
    recorded_at: float
    """Which baseline: epoch seconds of its recording."""
    chunks: int
    covered_bytes: int
    bad_chunks: int
    bad: list[BadChunk]
    """The first of them."""
    replaced: list[str]
    """Tensors that the model no longer uses: others took their place since the baseline."""
    not_covered: list[NotCovered]
    suspicions: list[str]
    """As in `SealFacts`."""
    seconds: float
    """Time spent on digests."""


class FingerprintReading(Wire):
    """All ranks."""

    ranks: list[RankReading]


class FingerprintPlan(Wire):
    """A sweep over all chunks of every rank.

    `steps` is the same for all ranks, however many chunks each holds, so that they work in step; `IntegrityFacts`
    says how many are best.
    """

    steps: int = Field(ge=1)


class Recorded(Wire):
    """A new baseline was recorded."""

    ranks: list[SealFacts]
    changed_chunks: int
    """Chunks, over all ranks, that differ from the baseline before."""


class CorrectionPlan(Wire):
    """Tensors whose values were wrong when the baseline was taken."""

    tensors: list[str] = Field(min_length=1)
    """Full names in the model, each once."""


class RankCorrection(Wire):
    """What became of them on one rank."""

    seal: SealFacts
    corrected: list[str]
    """Tensors whose baseline was not what the checkpoint has, and is now."""
    refused: list[str]
    """A sentence for each that could not be corrected."""


class Corrected(Wire):
    """All ranks."""

    ranks: list[RankCorrection]


class Method(StrEnum):
    """Where the right bytes came from."""

    PARITY = "parity"
    CHECKPOINT = "checkpoint"


class ChunkName(Wire):
    """One chunk of one rank."""

    rank: int = Field(ge=0)
    chunk: int = Field(ge=0)


class RepairOrder(Wire):
    """Put these chunks right.  `boot_id` guards against writing to a server that was restarted meanwhile."""

    boot_id: str
    chunks: list[ChunkName] = Field(min_length=1)


class ChunkRepair(Wire):
    """What became of one chunk."""

    rank: int
    chunk: int
    pieces: list[Piece]
    intact: bool
    """Its bytes are now those of the baseline, as its digest says."""
    method: Method | None = Field(strict=False)
    """None: nothing was written, since it was intact already or could not be repaired."""
    diagnoses: list[Diagnosis]
    reason: str | None
    """Why it is not intact, one sentence."""


class RepairReport(Wire):
    """What became of all of them."""

    chunks: list[ChunkRepair]
    paused_seconds: float


class WeightFile(Wire):
    """One file of the checkpoint that the model was loaded from."""

    name: str
    bytes: int


class CheckpointFacts(Wire):
    """Where the model came from."""

    folder: str
    files: list[WeightFile]
    refusal: str | None
    """Why the files cannot be read, one sentence."""


class FileOrder(Wire):
    """Take the digest of one file."""

    file: str


class FileDigest(Wire):
    """SHA-256 of one file as the disk holds it."""

    file: str
    bytes: int
    sha256: str
    how: str
    """`direct`: past the page cache; `advised`: the page cache was asked to let go of it first."""
    seconds: float


class RankComparison(Wire):
    """One rank's tensors against the checkpoint, bit by bit."""

    rank: Rank
    equal: int
    """Tensors."""
    different: list[str]
    """A sentence each: the tensor and how many of its values differ."""
    not_comparable: list[NotCovered]


class CheckpointReading(Wire):
    """All ranks."""

    ranks: list[RankComparison]
