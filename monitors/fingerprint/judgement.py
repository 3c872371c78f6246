"""The judgement of a sweep: are the served bytes those of the baseline, and was the baseline good?

Rules, worst first:

    failed      a chunk differs; values were not finite or absurd when the baseline was taken; the checkpoint's files
                are not those of the manifest, or memory is not the checkpoint
    unknown     no rank answered, or one holds nothing; tensors were replaced since the baseline; bytes that no digest
                can see: an uncovered tensor is never healthy
    ok          otherwise
"""

from pydantic import BaseModel, ConfigDict, Field

from ..finding import Action, Finding, Health
from ..moment import utc
from .facts import BadChunk, FileDigest, FingerprintReading, NotCovered, Rank, RankComparison, RankReading, blocks_of

NAME = "fingerprint"
"""The monitor's name."""


class RankChunk(BadChunk):
    """A bad chunk, and whose it is."""

    rank: int
    engine: int = 0
    """Data-parallel index of its engine."""

    @property
    def place(self) -> str:
        """Rank and engine, for people."""
        return str(Rank(rank=self.rank, data=self.engine))

    @property
    def blocks(self) -> list[int]:
        """The blocks that it touches."""
        return sorted(blocks_of(self.pieces))


class CheckpointVerdict(BaseModel):
    """Where the served bytes came from: the checkpoint's files against a manifest, memory against the checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float
    """Epoch seconds."""
    boot_id: str
    """The vLLM process whose memory was compared."""
    files: list[FileDigest]
    manifest: str | None
    """Which manifest the files were held against; None: against nothing."""
    problems: list[str]
    """What the manifest says otherwise, a sentence each."""
    ranks: list[RankComparison]

    @property
    def faults(self) -> list[str]:
        """All that is wrong, a sentence each without the full stop."""
        different = [f"{rank.rank}: {_bare(what)}" for rank in self.ranks for what in rank.different]
        return [*map(_bare, self.problems), *different]

    @property
    def equal(self) -> int:
        """Tensors, over all ranks."""
        return sum(rank.equal for rank in self.ranks)

    @property
    def verified(self) -> bool:
        """Nothing is wrong, and every rank had something to compare."""
        return bool(self.ranks) and all(rank.equal for rank in self.ranks) and not self.faults

    @property
    def sentence(self) -> str:
        """What the check came to, without the full stop."""
        against = "not checked against anything" if self.manifest is None else f"held against {self.manifest}"
        uncertain = sum(len(rank.not_comparable) for rank in self.ranks)
        files = f"{_count(len(self.files), 'file')} ({size(sum(file.bytes for file in self.files))}) {against}"
        told = f"{files}; {_count(self.equal, 'tensor')} in memory as in the checkpoint, {uncertain} not comparable"
        faults = self.faults
        return told if not faults else f"{told}; {_first(faults)}"


class FingerprintFinding(Finding):
    """The judgement, with every number it rests on."""

    chunks: int = Field(ge=0)
    """Over all ranks."""
    bad_chunks: int
    covered_bytes: int
    not_covered: list[NotCovered]
    bad: list[RankChunk]
    """The first bad chunks of each rank."""
    repairable: int
    """How many of `bad` parity can put right."""
    blocks: tuple[int, ...]
    """Blocks that `bad` touches."""
    doubts: tuple[str, ...] = ()
    """Why not all bytes could be compared, half sentences."""
    loaded_bad: tuple[str, ...] = ()
    """What was wrong before the baseline, half sentences: its values, the checkpoint, memory against the checkpoint."""
    checkpoint_verified: bool | None = None
    """Whether the last check of the checkpoint found nothing wrong; None: there was none."""


def judge(reading: FingerprintReading, provenance: CheckpointVerdict | None = None) -> FingerprintFinding:
    """Judge one sweep.

    Args:
        reading: All ranks.
        provenance: The last check of the checkpoint that these bytes were loaded from, if there was one.
    """
    ranks = reading.ranks
    bad = [RankChunk(rank=rank.rank.rank, engine=rank.rank.data, **dict(chunk)) for rank in ranks for chunk in rank.bad]
    chunks, bad_chunks = sum(rank.chunks for rank in ranks), sum(rank.bad_chunks for rank in ranks)
    doubts, loaded_bad = _doubts(ranks), _damage(ranks)
    if provenance is not None and provenance.faults:
        loaded_bad.append(f"the checkpoint was checked at {utc(provenance.at)}: {_first(provenance.faults)}")
    failures = _changes(ranks, chunks, bad_chunks, bad) + loaded_bad
    health = Health.FAILED if failures else Health.UNKNOWN if doubts else Health.OK
    reason = "; ".join([*failures, *doubts]) or _healthy(ranks, chunks, provenance)
    action = Action.REPAIR if bad_chunks else Action.NONE if health is Health.OK else Action.INVESTIGATE
    return FingerprintFinding(
        monitor=NAME,
        health=health,
        reason=reason[0].upper() + reason[1:],
        action=action,
        chunks=chunks,
        bad_chunks=bad_chunks,
        covered_bytes=sum(rank.covered_bytes for rank in ranks),
        not_covered=[tensor for rank in ranks for tensor in rank.not_covered],
        bad=bad,
        repairable=sum(chunk.unrepairable is None for chunk in bad),
        blocks=tuple(sorted({block for chunk in bad for block in chunk.blocks})),
        doubts=tuple(doubts),
        loaded_bad=tuple(loaded_bad),
        checkpoint_verified=None if provenance is None else provenance.verified,
    )


def size(count: int) -> str:
    """Bytes for people: 269.1 MB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def _healthy(ranks: list[RankReading], chunks: int, provenance: CheckpointVerdict | None) -> str:
    covered = size(sum(rank.covered_bytes for rank in ranks))
    told = f"all {chunks} chunks ({covered}) of {_count(len(ranks), 'rank')} are those of the {_baseline(ranks)}"
    if provenance is None or not provenance.verified:
        return told
    files = "" if provenance.manifest is None else ", whose files are those of the manifest"
    return f"{told}; at {utc(provenance.at)} {_count(provenance.equal, 'tensor')} were those of the checkpoint{files}"


def _changes(ranks: list[RankReading], chunks: int, bad_chunks: int, bad: list[RankChunk]) -> list[str]:
    if not bad_chunks:
        return []
    start = f"{bad_chunks} of {chunks} chunks {'differs' if bad_chunks == 1 else 'differ'} from the {_baseline(ranks)}"
    if not bad:
        return [start]
    first = bad[0]
    told = f"{start}: {'' if bad_chunks == 1 else 'first '}{_place(first)}"
    if first.diagnoses:
        told += f": {first.diagnoses[0].sentence()}"
    repairable = sum(chunk.unrepairable is None for chunk in bad)
    listed = "it" if bad_chunks == 1 else f"{repairable} of {'the first ' if len(bad) < bad_chunks else ''}{len(bad)}"
    if repairable:
        told += f"; parity can put {listed} right"
    lost = next((chunk for chunk in bad if chunk.unrepairable is not None), None)
    if lost is not None and lost.unrepairable is not None:
        told += f"; parity cannot put chunk {lost.chunk} of {lost.place} right: {_bare(lost.unrepairable)}"
    return [told]


def _place(chunk: RankChunk) -> str:
    parts = [chunk.place]
    if chunk.pieces:
        parts.append(chunk.pieces[0].tensor)
        if len(chunk.pieces) > 1:
            parts.append(f"{len(chunk.pieces) - 1} more in the same chunk")
    blocks = ", ".join(map(str, chunk.blocks))
    parts.append(f"block {blocks}" if blocks else "outside the blocks")
    return ", ".join([*parts, f"chunk {chunk.chunk}"])


def _damage(ranks: list[RankReading]) -> list[str]:
    """Values that no trained weight has, from the time of the baseline."""
    found = [f"{rank.rank}: {_bare(what)}" for rank in ranks for what in rank.suspicions]
    return [f"the weights were bad when the baseline was taken: {_first(found)}"] if found else []


def _doubts(ranks: list[RankReading]) -> list[str]:
    if not ranks:
        return ["no rank answered: nothing was compared"]
    doubts = [f"{rank.rank} holds no bytes to compare" for rank in ranks if not (rank.chunks and rank.covered_bytes)]
    replaced = [f"{name} of {rank.rank}" for rank in ranks for name in rank.replaced]
    if replaced:
        were = f"{_count(len(replaced), 'tensor')} {'was' if len(replaced) == 1 else 'were'}"
        doubts.append(f"{were} replaced since the {_baseline(ranks)}, first {replaced[0]}")
    missing = [(rank, tensor) for rank in ranks for tensor in rank.not_covered]
    if missing:
        rank, first = missing[0]
        doubts.append(f"{_uncovered(ranks)} not covered, first {first.tensor} of {rank.rank}: {_bare(first.reason)}")
    return doubts


def _uncovered(ranks: list[RankReading]) -> str:
    covered = sum(rank.covered_bytes for rank in ranks)
    tensors = [tensor for rank in ranks for tensor in rank.not_covered]
    missing = sum(tensor.bytes or 0 for tensor in tensors)
    unknown = sum(tensor.bytes is None for tensor in tensors)
    if unknown == len(tensors):
        be = "is" if unknown == 1 else "are"
        return f"beside the {size(covered)} that are covered, {_count(unknown, 'tensor')} of unknown size {be}"
    more = f" and {_count(unknown, 'tensor')} of unknown size" if unknown else ""
    return f"{size(missing)} of {size(covered + missing)}{more} are"


def _baseline(ranks: list[RankReading]) -> str:
    return f"baseline of {utc(min(rank.recorded_at for rank in ranks))}"


def _first(sentences: list[str]) -> str:
    """One of them stands for all."""
    return sentences[0] if len(sentences) == 1 else f"{sentences[0]} (and {len(sentences) - 1} more)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bare(sentence: str) -> str:
    return sentence.rstrip(".")
