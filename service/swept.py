"""A fresh look at all chunks of the weights: which have changed, and what that says about chunks and blocks."""

from collections.abc import Iterable, Sequence

from ..monitors.fingerprint.facts import ChunkRepair, FingerprintReading, Piece, blocks_of
from .gates import names


class Swept:
    """What a sweep saw.  A rank names only the first of its changed chunks: of the others, only how many is known."""

    def __init__(self, reading: FingerprintReading) -> None:
        self.chunks = sum(rank.chunks for rank in reading.ranks)
        self.changed = sum(rank.bad_chunks for rank in reading.ranks)
        self.unnamed = sum(max(0, rank.bad_chunks - len(rank.bad)) for rank in reading.ranks)
        self.replaced = [tensor for rank in reading.ranks for tensor in rank.replaced]
        self._whole = {rank.rank.rank for rank in reading.ranks if rank.bad_chunks == len(rank.bad)}
        self.bad = [
            ChunkRepair(
                rank=rank.rank.rank,
                chunk=bad.chunk,
                pieces=bad.pieces,
                intact=False,
                method=None,
                diagnoses=bad.diagnoses,
                reason=bad.unrepairable,
            )
            for rank in reading.ranks
            for bad in rank.bad
        ]
        """The changed chunks that were named, as nobody has repaired them yet; `reason`: why parity cannot."""
        self._bad = {(repair.rank, repair.chunk) for repair in self.bad}

    def touching(self, blocks: Iterable[int] | None) -> list[ChunkRepair]:
        """The changed chunks that reach into one of these blocks; all of them for None."""
        return self.bad if blocks is None else [bad for bad in self.bad if blocks_of(bad.pieces) & set(blocks)]

    def is_bad(self, repair: ChunkRepair) -> bool | None:
        """Whether this chunk is not that of the baseline; None where the look does not say."""
        if (repair.rank, repair.chunk) in self._bad:
            return True
        return False if repair.rank in self._whole else None

    def intact(self, block: int) -> bool:
        """Whether all bytes of the block are known to be those of the baseline."""
        return not self.unnamed and not self.replaced and not self.touching([block])

    def nothing_in(self, blocks: Sequence[int] | None) -> str:
        """Why there is nothing to repair in these blocks, one sentence; None for the whole model."""
        if not self.changed:
            sentence = f"Nothing to repair: all {self.chunks} chunks are those of the baseline"
        elif blocks is None or self.unnamed:
            sentence = f"{self.changed} chunks have changed, but none is named that could be repaired here"
        else:
            elsewhere = f"{self.changed} chunk{'s' * (self.changed > 1)} elsewhere changed"
            sentence = f"Nothing to repair in {names(blocks)}: all chunks there are those of the baseline; {elsewhere}"
        if self.unnamed and blocks is not None:
            sentence += ": repair without naming blocks"
        if self.replaced:
            others = len(self.replaced) - 1
            were = f" and {others} more were" if others else " was"
            sentence += f"; {self.replaced[0]}{were} replaced since, which a repair cannot put back"
        return f"{sentence}."


def changed_pieces(repair: ChunkRepair) -> list[Piece]:
    """The pieces of a chunk in which bytes have changed; all of them where no diagnosis says which."""
    tensors = {diagnosis.tensor for diagnosis in repair.diagnoses}
    return [piece for piece in repair.pieces if piece.tensor in tensors] or repair.pieces
