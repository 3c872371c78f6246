"""One rank beside its reference."""

from dataclasses import dataclass

from .comparison import Comparison, allowance, coarseness, compare
from .facts import STREAM, DifferentialReading, Noise, Point, RankStates, Sketch
from .reference import Conditions, Recording, same_numerics

Blocks = dict[int, dict[str, Point]]
"""Points by block and module, in the order in which they handed on."""


@dataclass(frozen=True)
class Pair:
    """What one rank measured, and what it is held against."""

    live: Blocks
    reference: Blocks
    noisy: Blocks
    """The side whose noise was measured."""
    walk: list[Sketch]
    reference_walk: list[Sketch]
    walk_noise: list[Noise]
    same: bool
    """Both sides were computed by the same kernels."""
    coarser: float
    """How much larger a unit in the last place is than on the side whose noise was measured."""
    size: int
    """K, numbers in a row of a sketch."""

    def modules(self, block: int) -> list[str]:
        """Paths of the modules inside a block, in the order in which they handed on."""
        return [module for module in self.live.get(block, {}) if module != STREAM]

    def compare(self, block: int, module: str, limit: float | None = None) -> Comparison:
        """What one module of a block handed on; `limit` takes the place of what noise explains."""
        live, reference, noisy = (side.get(block, {}).get(module) for side in (self.live, self.reference, self.noisy))
        noise = allowance(None if noisy is None else noisy.noise, self.same, self.coarser)
        return compare(
            None if live is None else live.sketch,
            None if reference is None else reference.sketch,
            noise if limit is None else limit,
            self.size,
        )

    def compare_walk(self, at: int, limit: float | None = None) -> Comparison:
        """The stream as served: 0 in front of the blocks, then behind each."""
        live, reference = (side[at] if at < len(side) else None for side in (self.walk, self.reference_walk))
        noise = allowance(self.walk_noise[at] if at < len(self.walk_noise) else None, self.same, self.coarser)
        return compare(live, reference, noise if limit is None else limit, self.size)


def pairs_with_checkpoint(now: DifferentialReading, size: int) -> list[Pair]:
    """Each rank beside the same rank with the checkpoint's tensors."""
    pairs = []
    for rank in now.ranks:
        live: Blocks = {states.block: _points(states.points) for states in rank.isolated}
        clean: Blocks = {states.block: _points(states.points) for states in rank.clean}
        pairs.append(
            Pair(
                live=live,
                reference=clean,
                noisy=live,
                walk=[],
                reference_walk=[],
                walk_noise=[],
                same=True,
                coarser=1.0,
                size=size,
            )
        )
    return pairs


def pairs_with_recording(now: DifferentialReading, conditions: Conditions, recording: Recording) -> list[Pair]:
    """Each rank beside the one of the same number, or beside the first where the recording has other ranks.

    The streams of all ranks are alike, and so is what the children of a block hand on; what lies below them may be a
    part, which a rank of another parallel size has not: its width differs.
    """
    then = {rank.rank.rank: rank for rank in recording.reading.ranks}
    if not then:
        return []
    alike = then.keys() == {rank.rank.rank for rank in now.ranks}
    same = same_numerics(recording.conditions, conditions)
    coarser = coarseness(now.dtype, recording.reading.dtype)
    size = recording.plan.size
    return [_pair(rank, then[rank.rank.rank if alike else min(then)], same, coarser, size) for rank in now.ranks]


def _pair(now: RankStates, then: RankStates, same: bool, coarser: float, size: int) -> Pair:
    reference: Blocks = {states.block: _points(states.points) for states in then.isolated}
    return Pair(
        live={states.block: _points(states.points) for states in now.isolated},
        reference=reference,
        noisy=reference,
        walk=now.walk,
        reference_walk=then.walk,
        walk_noise=then.walk_noise,
        same=same,
        coarser=coarser,
        size=size,
    )


def _points(points: list[Point]) -> dict[str, Point]:
    return {point.module: point for point in points}
