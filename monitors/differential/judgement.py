"""The judgement of a differential reading: does every block compute what its reference does on the same input?

Rules, worst first:

    failed      a block departs, run alone; a tensor is not the checkpoint's, be its block's output within the noise;
                the stream in front of the blocks departs; the loss is not finite where the reference's is, and no
                stream departs
    degraded    as served, the stream departs behind a block though no block does alone; or the loss does behind streams
                that do not
    unknown     many tensors are not the checkpoint's: it is not the one that this model was loaded from, and nothing
                that it says counts; no rank or no block; a block or a stream that cannot be told; a tensor that the
                checkpoint has no value for
    ok          otherwise

A skipped block is judged like any other, since alone it runs at alpha 1.  The streams and the loss as served are judged
only where neither side is served with a block skipped or damped, and the streams behind a block only without a limit: a
limit is for one block, and says nothing of what many of them add up to.  A loss that is not finite always fails.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..finding import Action, Health, Place
from .comparison import Comparison, together
from .facts import NAME, STREAM, DifferentialPlan, DifferentialReading
from .finding import BlockDivergence, DifferentialFinding, Effort
from .locations import clean_blocks, locate
from .pair import pairs_with_checkpoint, pairs_with_recording
from .reference import Conditions, Recording, ReferenceKind
from .sentences import (
    block_reason,
    counted,
    distance,
    doubted,
    failing,
    foreign,
    gated,
    healthy,
    losses,
    source,
    without_value,
)
from .walk import first_jump, walk

LOSS_NATS = 0.1
"""A mean loss that lies further than this from the reference's, behind equal streams, is damage behind the blocks.

Rounding moves it by a few thousandths, half precision against single by a hundredth."""

EQUAL_NATS = 1e-3
"""The same behind streams that are equal bit for bit, where only norm and head are left to round."""

FOREIGN_SHARE, FOREIGN_LEAST = 0.1, 4
"""With such a share of the comparable tensors different, and so many, the checkpoint is the wrong one; a fault hits
few."""

BLIND = "not compared: what lies outside the blocks, and buffers that no checkpoint has"

_DEFAULT_SIZE: int = DifferentialPlan.model_fields["size"].default


def judge(
    now: DifferentialReading,
    kind: ReferenceKind,
    recording: Recording | None = None,
    conditions: Conditions | None = None,
    limit: float | None = None,
    size: int = _DEFAULT_SIZE,
) -> DifferentialFinding:
    """Judge one reading.

    Args:
        now: All ranks.
        kind: What it is held against.
        recording: The states of that; None for the checkpoint, whose states are in `now`.
        conditions: Of `now`; told where there is a recording.
        limit: Largest relative L2 distance of a block that is allowed; None: what noise explains.
        size: Of the sketches, where there is no recording, whose plan has it.

    Raises:
        ValueError: a recorded or peer reference without a recording or conditions; a sketch that cannot be decoded.
    """
    if kind is ReferenceKind.CHECKPOINT:
        pairs = pairs_with_checkpoint(now, size)
    elif recording is not None and conditions is not None:
        pairs = pairs_with_recording(now, conditions, recording)
    else:
        raise ValueError(f"A reference that is {kind.value} needs a recording, and the conditions of now.")
    gates = now.gates
    alone = [together(pair.compare(block, STREAM, limit) for pair in pairs) for block in range(len(gates))]
    streams = [] if recording is None else walk(pairs, len(gates), limit)
    whole = all(gate == 1 for gate in [*gates, *([] if recording is None else recording.reading.gates)])
    blocks = [_block(block, gates[block], alone[block], streams) for block in range(len(gates))]
    cleans = clean_blocks(now)
    found = [locate(now, pairs, block, bool(alone[block].departs)) for block in range(len(gates))]
    places = [
        Place(block=block.block, reason=f"block {block.block}: {block.reason}; {counted(there.locations)}")
        for block, there in zip(blocks, found, strict=True)
        if there.locations
    ]
    nats = None if recording is None else _mean(now, recording.plan)
    reference_nats = None if recording is None else _mean(recording.reading, recording.plan)
    missing = tuple(dict.fromkeys(sentence for clean in cleans for sentence in clean.not_comparable))
    reference = source(kind, None if recording is None else recording.recorded_at)
    signs = _Signs()
    changed, comparable = sum(len(clean.tensors) for clean in cleans), sum(clean.comparable for clean in cleans)
    if changed >= max(FOREIGN_LEAST, FOREIGN_SHARE * comparable):
        signs.doubts.append(foreign(changed, comparable))
        found, places = [], []
        blocks = [block.model_copy(update={"departs": None}) for block in blocks]
    elif now.ranks and gates:
        signs.of_blocks(blocks, places, reference)
        signs.of_streams(streams, judged=whole and limit is None)
        if recording is not None:
            signs.of_loss(nats, reference_nats, *_losses_apart(streams, limit, whole=whole))
        if missing:
            signs.doubts.append(without_value(missing))
    else:
        what = "the model has no blocks" if now.ranks else "no rank answered"
        signs.doubts.append(f"{what}: nothing was compared")
    jump = first_jump(streams) if whole and streams else None
    told = [*signs.all, *([] if signs.any else [healthy(blocks, reference)])]
    told += [f"the walk jumps first at block {jump}"] if jump is not None else []
    told += [BLIND] if recording is None and signs.health is Health.OK else []
    told += _notes(gates, recording, nats, reference_nats, any(rank.nats for rank in now.ranks))
    reason = "; ".join(told)
    locations = tuple(location for there in found for location in there.locations)
    return DifferentialFinding(
        monitor=NAME,
        health=signs.health,
        reason=reason[0].upper() + reason[1:],
        places=tuple(places),
        action=_action(signs.health, repairable=any(location.tensor is not None for location in locations)),
        reference=kind,
        recorded_at=None if recording is None else recording.recorded_at,
        blocks=tuple(blocks),
        first_jump=jump,
        locations=locations,
        effort=Effort(
            blocks=sum(comparison.divergence is not None for comparison in alone),
            sublayers=sum(there.sublayers for there in found),
            digests=sum(clean.comparisons.digests for clean in cleans),
            tensors=sum(clean.comparisons.tensors for clean in cleans),
            brute_force=sum(clean.comparable for clean in cleans),
        ),
        nats=nats,
        reference_nats=reference_nats,
        not_comparable=missing,
    )


@dataclass
class _Signs:
    """What speaks for each health, in sentences."""

    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[str]:
        return [*self.failures, *self.warnings, *self.doubts]

    @property
    def any(self) -> bool:
        return bool(self.all)

    @property
    def health(self) -> Health:
        if self.failures:
            return Health.FAILED
        if self.warnings:
            return Health.DEGRADED
        return Health.UNKNOWN if self.doubts else Health.OK

    def of_blocks(self, blocks: Sequence[BlockDivergence], places: Sequence[Place], reference: str) -> None:
        """Each block alone."""
        departing = {block.block for block in blocks if block.departs}
        if departing:
            reasons = [place.reason for place in places if place.block in departing]
            self.failures.append(failing(reasons, len(blocks), reference))
        self.failures += [place.reason for place in places if place.block not in departing]
        unknown = [block for block in blocks if block.departs is None]
        if unknown:
            self.doubts.append(doubted(unknown))

    def of_streams(self, streams: Sequence[Comparison], *, judged: bool) -> None:
        """The walk: what is in front of the blocks always, no gate being there; the rest where it is `judged`."""
        if streams and streams[0].departs:
            damage = "the damage lies in front of them, in the embedding"
            self.failures.append(f"the stream in front of the blocks departs, {distance(streams[0])}: {damage}")
        for at, stream in enumerate(streams):
            if stream.departs is None and (judged or at == 0):
                where = f"behind block {at - 1}" if at else "in front of the blocks"
                self.doubts.append(f"the stream {where}, as served: {distance(stream)}")
                break
        departing = [at for at, stream in enumerate(streams) if stream.departs and at]
        if judged and departing and not self.failures:
            where = f"behind block {departing[0] - 1}, {distance(streams[departing[0]])}"
            # A block that cannot be told may be the cause.
            if self.doubts:
                self.warnings.append(f"as served the stream departs {where}")
                return
            why = "something that the short inputs of the blocks do not reach, such as an expert"
            self.warnings.append(f"no block departs alone, but as served the stream does {where}: {why}")

    def of_loss(self, nats: float | None, reference_nats: float | None, below: float, above: float) -> None:
        """Behind streams that do not depart, as far as can be told; a loss that is no number is never right."""
        if reference_nats is None:
            self.doubts.append("the loss of the reference is not finite, or was not measured")
        if self.failures or self.warnings:
            return
        damage = "the streams are right, and the loss is not: the damage lies behind the blocks"
        if self.doubts:
            damage = "the loss is not that of the reference"
        if nats is None:
            self.failures.append(damage)
        elif reference_nats is not None and not -below <= nats - reference_nats <= above:
            self.warnings.append(damage)


def _losses_apart(streams: Sequence[Comparison], limit: float | None, *, whole: bool) -> tuple[float, float]:
    """How far the mean loss may lie below and above the reference's."""
    if not whole:
        return math.inf, math.inf
    if limit is not None:
        # Of an update the loss may be better.
        return math.inf, LOSS_NATS
    equal = bool(streams) and all(stream.l2 == 0.0 for stream in streams)
    return (EQUAL_NATS, EQUAL_NATS) if equal else (LOSS_NATS, LOSS_NATS)


def _block(block: int, gate: float, alone: Comparison, streams: Sequence[Comparison]) -> BlockDivergence:
    behind = streams[block + 1] if streams else None
    return BlockDivergence(
        block=block,
        gate=gate,
        l2=alone.l2,
        cosine=alone.cosine,
        allowed=alone.allowed,
        departs=alone.departs,
        walk_l2=None if behind is None else behind.l2,
        walk_cosine=None if behind is None else behind.cosine,
        reason=block_reason(alone, gate),
    )


def _mean(reading: DifferentialReading, plan: DifferentialPlan) -> float | None:
    """Mean loss of the tokens, of the first rank that has logits; None where that of a sequence is not finite."""
    nats = next((rank.nats for rank in reading.ranks if any(loss is not None for loss in rank.nats)), [])
    # No token predicts the first one.
    counts = [len(row) - 1 for row in plan.tokens]
    finite = [loss * count for loss, count in zip(nats, counts, strict=True) if loss is not None] if nats else []
    return sum(finite) / sum(counts) if finite and len(finite) == len(nats) else None


def _notes(
    gates: Sequence[float],
    recording: Recording | None,
    nats: float | None,
    reference_nats: float | None,
    measured: bool,
) -> list[str]:
    """Losses, and gates."""
    notes = [losses(nats, reference_nats)] if measured and recording is not None else []
    unjudged = "" if recording is None else ", so that the walk behind them is not judged"
    if any(gate != 1 for gate in gates):
        notes.append(f"served with {gated(gates)}{unjudged}")
    if recording is not None and any(gate != 1 for gate in recording.reading.gates):
        notes.append(f"recorded with {gated(recording.reading.gates)}{unjudged}")
    return notes


def _action(health: Health, *, repairable: bool) -> Action:
    if health is Health.OK:
        return Action.NONE
    return Action.REPAIR if repairable else Action.INVESTIGATE
