"""The weights of one rank with the digests and the parity of a time when they were known to be good."""

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .diagnosis import Diagnosis, diagnose
from .digest import Digest, digest_for
from .facts import BadChunk, NotCovered, ParityPlace, Piece, Rank, RankReading, SealFacts
from .line import Line, Part, Source
from .parity import Parity, ParityLost
from .suspicion import suspicion

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_BAD = 64
"""Changed chunks that a reading names one by one."""
MOST_DIAGNOSED = 8
"""Changed chunks that a sweep diagnoses: each takes reading its whole group."""


class Unrepairable(Exception):
    """Parity cannot give the bytes back; one sentence."""


class SealedWeights:
    """Digests, parity, and what can be done with them.  All methods run while the engine computes nothing.

    Args:
        line: The weights.  There is at least one.
        rank: Whose they are.
        not_covered: Tensors that are not on the line, and why.
        replaced: Names the tensors on the line that the model no longer uses.
        group: How many chunks share a block of parity; 0 for no parity.
        new_parity: Makes an empty place for parity.
        device: Where the line lies.
    """

    def __init__(
        self,
        line: Line,
        rank: Rank,
        *,
        device: "torch.device",
        not_covered: Sequence[NotCovered] = (),
        replaced: Callable[[], list[str]] = list,
        group: int,
        new_parity: Callable[[], Parity],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.line = line
        self.rank = rank
        self._device = device
        self._not_covered = list(not_covered)
        self._replaced = replaced
        self.groups = -(-line.num_chunks // group) if group else 0
        self._new_parity = new_parity
        self._now = now
        self._digest: Digest = digest_for(device, line.chunk_bytes)
        self._tags: list[bytes] = []
        self._parity: Parity | None = None
        self._parity_tags: list[bytes] = []
        self._suspicions: dict[str, list[str]] = {}
        """By tensor."""
        self._recorded_at = 0.0

    # Recording

    def record(self, steps: int = 1) -> Generator[None, None, int]:
        """Take a new baseline of what lies in memory now; yields after each of `steps` parts of the work.

        Until the last step the old one counts.  Returns how many chunks differ from the old one.  Raises `OSError`
        where the parity finds no place.
        """
        tags = [b""] * self.line.num_chunks
        parity = self._new_parity() if self.groups else None
        parity_tags: list[bytes] = []
        suspicions: dict[str, list[str]] = {}

        def take(chunk: int, block: "Tensor | None" = None) -> None:
            tags[chunk] = self._digest.of(self.line.memory(chunk))
            if block is not None:
                self.line.add(chunk, block)

        def keep(parity: Parity, group: int, block: "Tensor") -> None:
            parity_tags.append(self._digest.of([block]))
            parity.put(group, block.cpu())

        def suspect(source: Source) -> None:
            suspicions[source.name] = list(suspicion(source.name, source.tensor))

        def work() -> Iterable[Callable[[], None]]:
            if parity is None:
                yield from (partial(take, chunk) for chunk in range(self.line.num_chunks))
            else:
                for group in range(self.groups):
                    block = self._zeros()
                    yield from (partial(take, chunk, block) for chunk in self._members(group))
                    yield partial(keep, parity, group, block)
            yield from (partial(suspect, stretch.source) for stretch in self.line.stretches)

        units = self.line.num_chunks + self.groups + len(self.line.stretches)
        try:
            yield from _cut(work(), units, steps)
        except BaseException:
            if parity is not None:
                parity.close()
            raise
        changed = sum(old != new for old, new in zip(self._tags, tags, strict=False))
        if self._parity is not None:
            self._parity.close()
        self._tags, self._parity, self._parity_tags = tags, parity, parity_tags
        self._suspicions, self._recorded_at = suspicions, self._now()
        return changed

    def facts(self) -> SealFacts:
        """What was recorded."""
        return SealFacts(
            rank=self.rank,
            device=str(self._device),
            digest=self._digest.name,
            recorded_at=self._recorded_at,
            chunk_bytes=self.line.chunk_bytes,
            chunks=self.line.num_chunks,
            tensors=len(self.line.stretches),
            covered_bytes=self.line.covered_bytes,
            not_covered=self._not_covered,
            parity=ParityPlace.NONE if self._parity is None else self._parity.place,
            parity_bytes=self.groups * self.line.chunk_bytes,
            parity_groups=self.groups,
            suspicions=self._suspected(),
        )

    # Looking

    def is_intact(self, chunk: int) -> bool:
        """Are the chunk's bytes those of the baseline?"""
        return self._digest.of(self.line.memory(chunk)) == self._tags[chunk]

    def fits(self, chunk: int, data: "Tensor") -> bool:
        """Are (length) uint8 the baseline's bytes of this chunk?"""
        return self._digest.of([data]) == self._tags[chunk]

    def sweep(self, steps: int = 1) -> Generator[None, None, RankReading]:
        """Hold all chunks against the baseline; yields after each of `steps` parts of the work."""
        changed: list[int] = []
        seconds = 0.0

        def look(chunk: int) -> None:
            nonlocal seconds
            began = time.perf_counter()
            if not self.is_intact(chunk):
                changed.append(chunk)
            seconds += time.perf_counter() - began

        chunks = self.line.num_chunks
        yield from _cut((partial(look, chunk) for chunk in range(chunks)), chunks, steps)
        named = changed[:MOST_BAD]
        return RankReading(
            rank=self.rank,
            recorded_at=self._recorded_at,
            chunks=chunks,
            covered_bytes=self.line.covered_bytes,
            bad_chunks=len(changed),
            bad=[
                self.described(chunk) if at < MOST_DIAGNOSED else self._listed(chunk, changed)
                for at, chunk in enumerate(named)
            ],
            replaced=self._replaced(),
            not_covered=self._not_covered,
            suspicions=self._suspected(),
            seconds=seconds,
        )

    def diagnoses(self, chunk: int, right: "Tensor", wrong: "Tensor") -> list[Diagnosis]:
        """What changed in each tensor of a chunk, given its (length) uint8 bytes before and after."""
        found = []
        for part in self.line.parts(chunk):
            of = slice(part.at, part.at + part.stop - part.start)
            source = part.stretch.source
            offset = part.stretch.offset + part.start
            before, after = right[of], wrong[of]
            try:
                diagnosis = diagnose(source.name, source.tensor, offset, before, after, self._others(part))
            except ValueError:
                # Padded or repeated: its elements do not fill its memory, which is named byte by byte.
                flat = before.new_empty(offset + before.numel(), device="meta")
                diagnosis = diagnose(source.name, flat, offset, before, after)
            if diagnosis is not None:
                found.append(diagnosis)
        return found

    def pieces(self, chunk: int, diagnoses: Iterable[Diagnosis]) -> list[Piece]:
        """What a chunk consists of; with diagnoses only the pieces in which something changed."""
        touched = {diagnosis.tensor for diagnosis in diagnoses}
        pieces = [part.piece for part in self.line.parts(chunk)]
        return [piece for piece in pieces if not touched or piece.tensor in touched]

    # Putting right

    def rebuilt(self, chunk: int) -> "Tensor":
        """(length) uint8: the baseline's bytes of a chunk, from parity and the other chunks of its group.

        Raises `Unrepairable`.  Nothing is written.
        """
        if self._parity is None:
            raise Unrepairable("No parity is kept.")
        group = chunk % self.groups
        try:
            block = self._parity.get(group).to(self._device)
        except ParityLost as lost:
            raise Unrepairable(str(lost)) from lost
        if self._digest.of([block]) != self._parity_tags[group]:
            raise Unrepairable(f"The parity of group {group} is damaged itself.")
        others = [other for other in self._members(group) if other != chunk]
        for other in others:
            self.line.add(other, block)
        right = block[: self.line.length(chunk)]
        if not self.fits(chunk, right):
            bad = [str(other) for other in others if not self.is_intact(other)]
            why = f"chunk {', '.join(bad)} of the same group {group} changed too" if bad else "the digest is damaged"
            raise Unrepairable(f"Parity does not give chunk {chunk} back: {why}.")
        return right

    def put_right(self, chunk: int, data: "Tensor") -> None:
        """Write (length) uint8 that are the baseline's, and read them back.

        Raises `Unrepairable` when the memory does not hold them, or when they are not the baseline's: then nothing
        was written.
        """
        if not self.fits(chunk, data):
            raise Unrepairable(f"The bytes for chunk {chunk} are not those of the baseline.")
        self.line.write(chunk, data)
        if not self.is_intact(chunk):
            raise Unrepairable(f"Chunk {chunk} reads other bytes than were written: the memory itself is broken.")

    def known_good(self, chunk: int) -> "Tensor":
        """(length) uint8: the baseline's bytes of a chunk, from memory where they lie there, else from parity.

        Raises `Unrepairable`.
        """
        return self.line.read(chunk) if self.is_intact(chunk) else self.rebuilt(chunk)

    def correct(self, name: str, right: "Mapping[int, Tensor]") -> None:
        """The baseline of the tensor `name` was wrong: what its chunks should be, chunk -> (length) uint8.

        Memory is not touched.  Raises `Unrepairable` where the parity of a group cannot be told; nothing has changed
        then.
        """
        if self._parity is not None:
            groups = {chunk % self.groups for chunk in right}
            for group, block in {group: self._corrected(group, right) for group in groups}.items():
                self._parity.put(group, block.cpu())
                self._parity_tags[group] = self._digest.of([block])
        for chunk, data in right.items():
            self._tags[chunk] = self._digest.of([data])
        # Whoever corrects has looked at the values.
        self._suspicions.pop(name, None)

    def _corrected(self, group: int, right: "Mapping[int, Tensor]") -> "Tensor":
        """(chunk) uint8: the parity of a group with other bytes in some of its chunks."""
        block = self._zeros()
        for chunk in self._members(group):
            data = right[chunk] if chunk in right else self.known_good(chunk)
            block[: self.line.length(chunk)] ^= data
        return block

    def described(self, chunk: int) -> BadChunk:
        """A changed chunk, diagnosed where parity can tell what it was."""
        diagnoses: list[Diagnosis] = []
        why = None
        try:
            right = self.rebuilt(chunk)
            diagnoses = self.diagnoses(chunk, right, self.line.read(chunk))
        except Unrepairable as reason:
            why = str(reason)
        return BadChunk(chunk=chunk, pieces=self.pieces(chunk, diagnoses), diagnoses=diagnoses, unrepairable=why)

    def _listed(self, chunk: int, changed: Sequence[int]) -> BadChunk:
        """The same without reading its group: which others have `changed` says whether parity can do anything."""
        why = None
        if self._parity is None:
            why = "No parity is kept."
        elif (bad := sum(other % self.groups == chunk % self.groups for other in changed)) > 1:
            why = f"{bad} chunks of its group {chunk % self.groups} have changed, and parity gives one back."
        return BadChunk(chunk=chunk, pieces=self.pieces(chunk, []), diagnoses=[], unrepairable=why)

    def _others(self, part: Part) -> Iterable[tuple[str, "Tensor"]]:
        """The same place in each other tensor: where a stale page would come from."""
        for stretch in self.line.stretches:
            if stretch is not part.stretch and stretch.memory.numel() >= part.stop and not stretch.offset:
                yield stretch.source.name, stretch.memory[part.start : part.stop]

    def _suspected(self) -> list[str]:
        return [sentence for sentences in self._suspicions.values() for sentence in sentences]

    def _members(self, group: int) -> range:
        return range(group, self.line.num_chunks, self.groups)

    def _zeros(self) -> "Tensor":
        import torch

        return torch.zeros(self.line.chunk_bytes, dtype=torch.uint8, device=self._device)


def _cut(work: Iterable[Callable[[], None]], units: int, steps: int) -> Generator[None, None, None]:
    """Do `units` units of work; yields `steps` times, after as equal parts as can be."""
    units_of = iter(work)
    for step in range(steps):
        for _ in range(units * step // steps, units * (step + 1) // steps):
            next(units_of)()
        yield
