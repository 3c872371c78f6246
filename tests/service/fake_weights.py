"""Weights without bytes: chunks that are the baseline's or not, and what sweep and repair say of them.

weights = FakeWeights()
weights.damage(7, 4)                              # chunk 7 of rank 0, which lies in block 4
weights.damage(8, 4, None)                        # reaches from block 4 to outside the blocks
weights.damage(9, 2, parity="two of one group")   # only the checkpoint can put it right
weights.damage(9, 2, parity="...", checkpoint="The file is gone.")       # nothing can
weights.stuck.add((0, 7))                         # bad again as soon as it has been repaired
weights.reading(), weights.repair(order)
"""

from flipwatch.monitors.fingerprint.diagnosis import Change, Diagnosis, Pattern
from flipwatch.monitors.fingerprint.facts import (
    BadChunk,
    ChunkRepair,
    FingerprintReading,
    Method,
    Piece,
    Rank,
    RankReading,
    RepairOrder,
    RepairReport,
)

CHUNK_BYTES = 2**20


class FakeWeights:
    """See the module's docstring."""

    def __init__(self, chunks: int = 40, ranks: int = 1) -> None:
        self.chunks = chunks
        self.ranks = ranks
        self.named = 100
        """How many changed chunks of a rank a reading names."""
        self.replaced: list[str] = []
        self.stuck: set[tuple[int, int]] = set()
        self.bad: dict[tuple[int, int], BadChunk] = {}
        self.repaired: set[int | None] = set()
        """Blocks in which something was put right; None: outside."""
        self._hopeless: dict[tuple[int, int], str] = {}

    def damage(
        self, chunk: int, *blocks: int | None, rank: int = 0, parity: str | None = None, checkpoint: str | None = None
    ) -> None:
        """Flip bit 14 of one element in the first of these blocks; why parity and checkpoint cannot put it right."""
        pieces = [Piece(tensor=_tensor(block), block=block, start=0, stop=CHUNK_BYTES) for block in blocks]
        change = Change(
            element=[12, 345], bits=[14], before="0.01", after="4.0", before_bits="0x3c24", after_bits="0x7c24"
        )
        diagnosis = Diagnosis(
            tensor=pieces[0].tensor,
            dtype="bfloat16",
            elements=1,
            bits=1,
            first=[12, 345],
            last=[12, 345],
            pattern=Pattern.SINGLE_FLIP,
            source=None,
            changes=[change],
        )
        # Only parity knows the bytes as they were, before somebody reads the checkpoint.
        known = [diagnosis] if parity is None else []
        self.bad[rank, chunk] = BadChunk(chunk=chunk, pieces=pieces, diagnoses=known, unrepairable=parity)
        if checkpoint is not None:
            self._hopeless[rank, chunk] = checkpoint

    def reload(self) -> None:
        """A new process: the bytes are good again."""
        self.bad.clear()
        self._hopeless.clear()

    def reading(self) -> FingerprintReading:
        """All ranks."""
        return FingerprintReading(ranks=[self._rank(rank) for rank in range(self.ranks)])

    def repair(self, order: RepairOrder) -> RepairReport:
        """Put right what can be put right."""
        return RepairReport(chunks=[self._repair(name.rank, name.chunk) for name in order.chunks], paused_seconds=0.25)

    def _rank(self, rank: int) -> RankReading:
        bad = [bad for (whose, _), bad in sorted(self.bad.items()) if whose == rank]
        return RankReading(
            rank=Rank(rank=rank, tensor=rank),
            recorded_at=1000.0,
            chunks=self.chunks,
            covered_bytes=self.chunks * CHUNK_BYTES,
            bad_chunks=len(bad),
            bad=bad[: self.named],
            replaced=self.replaced,
            not_covered=[],
            suspicions=[],
            seconds=0.01,
        )

    def _repair(self, rank: int, chunk: int) -> ChunkRepair:
        bad = self.bad.get((rank, chunk))
        method, reason = None, None
        if bad is not None:
            reason = self._hopeless.get((rank, chunk))
            if reason is None:
                method = Method.PARITY if bad.unrepairable is None else Method.CHECKPOINT
                self.repaired |= {piece.block for piece in bad.pieces}
                if (rank, chunk) not in self.stuck:
                    del self.bad[rank, chunk]
        return ChunkRepair(
            rank=rank,
            chunk=chunk,
            pieces=[] if bad is None else bad.pieces,
            intact=reason is None,
            method=method,
            diagnoses=[] if bad is None else bad.diagnoses,
            reason=reason,
        )


def _tensor(block: int | None) -> str:
    return "model.embed_tokens.weight" if block is None else f"model.layers.{block}.mlp.up_proj.weight"
