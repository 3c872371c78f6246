"""The numbers of the alpha-scan, and how the readings of one scan are joined."""

from collections.abc import Sequence

from pydantic import ConfigDict, Field

from ..wire import Wire


class AlphaScanReading(Wire):
    """Numbers of one measurement; N sequences in the plan's order."""

    model_config = ConfigDict(allow_inf_nan=False)

    alphas: list[float]
    gates: list[float]
    """Alpha per block as served while measured."""
    left_out: list[int] = Field(default=[])
    """Blocks that the measured model did without, besides the gates."""
    group: int = 1
    """So many neighbouring blocks were scaled together."""
    first_sequence: int = 0
    """Index of the first sequence in the validation set."""
    scored_tokens: list[int]
    """(N) scored positions."""
    pass_tokens: int
    """Tokens of one forward pass over the sequences, without padding."""
    base_nats: list[float | None]
    """(N) mean loss per scored token of the model without `left_out`; None = not finite."""
    nats: list[list[list[float | None]]]
    """Block x alpha x N, as `base_nats`; [] for what was not measured.  Groups stand at their first block."""
    nonfinite_blocks: list[int]
    """Blocks whose output is not finite where their input was, ascending."""
    exploding_blocks: list[int] = Field(default=[])
    """Blocks that add far more than the stream holds, ascending."""
    passes: float
    """Forward-pass equivalents used: tokens through block calls, padding included, over one pass's share."""

    @property
    def complete(self) -> bool:
        """Curves could be measured: no block had to be left out first."""
        return not self.nonfinite_blocks and not self.exploding_blocks

    def at(self, block: int, alpha: float) -> list[float | None]:
        """(N) losses with `block` at `alpha`; [] when not measured."""
        rows = self.nats[block]
        return rows[self.alphas.index(alpha)] if rows and alpha in self.alphas else []


def joined(readings: Sequence[AlphaScanReading]) -> AlphaScanReading:
    """One reading of readings of the same model (gates, left out), which may differ in blocks, alphas and sequences.

    Groups of blocks are left aside, unless there is nothing else.  Where a block was measured at an alpha on some of
    the sequences only, that row is left out as well.
    """
    single = [reading for reading in readings if reading.group == 1] or list(readings)
    parts = _parts(single)
    whole = sum(len(part.base_nats) for part in parts)
    alphas = sorted({alpha for reading in single for alpha in reading.alphas})
    nats = []
    for block in range(len(parts[0].nats)):
        rows = [[loss for part in parts for loss in _row(single, part, block, alpha)] for alpha in alphas]
        rows = [row if len(row) == whole else [] for row in rows]
        nats.append(rows if any(rows) else [])
    pass_tokens = sum(part.pass_tokens for part in parts)
    return AlphaScanReading(
        alphas=alphas,
        gates=parts[0].gates,
        left_out=parts[0].left_out,
        group=single[0].group,
        first_sequence=parts[0].first_sequence,
        scored_tokens=[count for part in parts for count in part.scored_tokens],
        pass_tokens=pass_tokens,
        base_nats=[loss for part in parts for loss in part.base_nats],
        nats=nats,
        nonfinite_blocks=sorted({block for reading in readings for block in reading.nonfinite_blocks}),
        exploding_blocks=sorted({block for reading in readings for block in reading.exploding_blocks}),
        passes=sum(reading.passes * reading.pass_tokens for reading in readings) / max(1, pass_tokens),
    )


def rounds(readings: Sequence[AlphaScanReading]) -> list[AlphaScanReading]:
    """One joined reading for each set of blocks left out, in the order in which they were measured."""
    models: dict[tuple[int, ...], list[AlphaScanReading]] = {}
    for reading in readings:
        models.setdefault(tuple(reading.left_out), []).append(reading)
    return [joined(of_one) for of_one in models.values()]


def _parts(readings: Sequence[AlphaScanReading]) -> list[AlphaScanReading]:
    """Readings that hold every sequence once: from the first sequence on, each time the one that holds most."""
    starts: dict[int, AlphaScanReading] = {}
    for reading in readings:
        known = starts.setdefault(reading.first_sequence, reading)
        if len(reading.base_nats) > len(known.base_nats):
            starts[reading.first_sequence] = reading
    parts: list[AlphaScanReading] = []
    after = min(starts)
    for start in sorted(starts):
        if start == after:
            parts.append(starts[start])
            after += len(starts[start].base_nats)
    return parts


def _row(readings: Sequence[AlphaScanReading], part: AlphaScanReading, block: int, alpha: float) -> list[float | None]:
    """The losses of one part of the sequences, from whichever reading of the same sequences has them."""
    for reading in readings:
        same = reading.first_sequence == part.first_sequence and len(reading.base_nats) == len(part.base_nats)
        if same and (row := reading.at(block, alpha)):
            return row
    return []
