"""Single bits flipped on purpose, and whether they are seen and named; each detector looks at the same flips."""

import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from flipwatch.monitors.faults import FaultKind, FaultSpec, inject
from flipwatch.monitors.fingerprint.diagnosis import Pattern
from flipwatch.monitors.fingerprint.facts import RankReading
from flipwatch.monitors.fingerprint.line import Line, Source
from flipwatch.monitors.fingerprint.sealed import SealedWeights

T = TypeVar("T")

BY_BYTES = "uniform over bytes"
BY_TENSOR = "uniform over tensors"
PARAMETER = "in parameters"
OTHER = "in buffers and attributes"

Count = tuple[int, int]
"""How many of how many."""


class Flip(NamedTuple):
    """One bit of one element."""

    source: Source
    element: tuple[int, ...]
    bit: int
    chunk: int
    groups: tuple[str, str]
    """How it was drawn, and in what kind of tensor it lies."""


class Peer(Protocol):
    """Another detector."""

    name: str
    most: int
    """It looks at so many of the flips, the first ones."""

    def differs(self) -> bool:
        """One check: is the model another one than at the reference?"""
        ...


@dataclass
class Tally:
    """What one detector saw, by group of flips and in sum."""

    counts: dict[str, list[int]] = field(default_factory=dict)

    def add(self, flip: Flip, seen: bool) -> None:
        """One more flip."""
        for group in ("all", *flip.groups):
            count = self.counts.setdefault(group, [0, 0])
            count[0] += seen
            count[1] += 1


def finish(work: Generator[None, None, T]) -> T:
    """Run a measurement to its end."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            result: T = stop.value
            return result


def draw(line: Line, parameters: set[int], count: int, share_by_tensor: float, seed: int) -> list[Flip]:
    """Random flips, in random order: most uniform over the bytes of the line, a share uniform over its tensors.

    `parameters` are the ids of the tensors that are parameters.
    """
    generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
    sources = list({id(stretch.source.tensor): stretch.source for stretch in line.stretches}.values())
    sizes = [source.tensor.numel() * source.tensor.element_size() for source in sources]
    flips = []
    for _ in range(count):
        by_tensor = generator.random() < share_by_tensor
        source = generator.choices(sources, None if by_tensor else sizes)[0]
        index = tuple(generator.randrange(length) for length in source.tensor.shape)
        bit = generator.randrange(8 * source.tensor.element_size())
        kind = PARAMETER if id(source.tensor) in parameters else OTHER
        flips.append(
            Flip(source, index, bit, chunk_of(line, source.tensor, index), (BY_TENSOR if by_tensor else BY_BYTES, kind))
        )
    return flips


def chunk_of(line: Line, tensor: Tensor, index: Sequence[int]) -> int:
    """Where an element lies on the line, by its address: not the way in which a diagnosis finds the element."""
    step = sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
    address = tensor.data_ptr() + step * tensor.element_size()
    for stretch in line.stretches:
        at = address - stretch.memory.data_ptr()
        if 0 <= at < stretch.memory.numel():
            return (stretch.start + at) // line.chunk_bytes
    raise LookupError(f"Element {list(index)} lies in no chunk.")


@contextmanager
def flipped(flip: Flip) -> Iterator[None]:
    """Within it the bit is another one."""
    shape = flip.source.tensor.shape
    flat = 0
    for i, length in zip(flip.element, shape, strict=True):
        flat = flat * length + i
    undo = inject(FaultSpec(kind=FaultKind.FLIPS, flips=[(flat, flip.bit)]), flip.source.tensor)
    try:
        yield
    finally:
        undo()


def is_named(reading: RankReading, flip: Flip) -> bool:
    """Does a sweep name this tensor, chunk, element and bit, and nothing else?"""
    if reading.bad_chunks != 1 or reading.bad[0].chunk != flip.chunk or len(reading.bad[0].diagnoses) != 1:
        return False
    found = reading.bad[0].diagnoses[0]
    return (
        (found.tensor, found.pattern, found.elements, found.bits) == (flip.source.name, Pattern.SINGLE_FLIP, 1, 1)
        and found.changes[0].element == list(flip.element)
        and found.changes[0].bits == [flip.bit]
    )


def run(
    sealed: SealedWeights, flips: Sequence[Flip], peers: Sequence[Peer], tick: Callable[[], None]
) -> tuple[dict[str, Any], dict[str, Tally]]:
    """Flip, look with every detector, flip back.

    Returns the figures of the fingerprint, and the tallies by detector.
    """
    tallies = {name: Tally() for name in ("fingerprint", *(peer.name for peer in peers))}
    named = Tally()
    missed = []
    for number, flip in enumerate(flips):
        with flipped(flip):
            reading = finish(sealed.sweep())
            tallies["fingerprint"].add(flip, reading.bad_chunks > 0)
            named.add(flip, is_named(reading, flip))
            if not is_named(reading, flip):
                missed.append(f"{flip.source.name} {list(flip.element)} bit {flip.bit}")
            for peer in peers:
                if number < peer.most:
                    tallies[peer.name].add(flip, peer.differs())
        tick()
    healthy = finish(sealed.sweep())
    figures = {
        "flips": len(flips),
        "tensors_hit": len({flip.source.name for flip in flips}),
        "chunks_hit": len({flip.chunk for flip in flips}),
        "named": named.counts,
        "not_named": missed[:20],
        "intact_afterwards": healthy.bad_chunks == 0,
    }
    return figures, tallies


def wilson(count: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): (0, 1) for none of none."""
    if not of:
        return 0.0, 1.0
    share, weight = count / of, z * z / of
    middle = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / of + weight / of / 4) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)
