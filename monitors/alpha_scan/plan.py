"""What one measurement of the alpha-scan runs: grid, blocks, sequences, and what they cost."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from pydantic import ConfigDict, Field, model_validator

from ..wire import Wire

if TYPE_CHECKING:
    from torch import Tensor

FULL_GRID = (0.0, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.4)
"""The published grid, and 0: scaling cannot undo saturation or NaN, leaving the block out can."""

QUICK_GRID = (0.0, 0.7, 1.3)

GRIDS = {"quick": QUICK_GRID, "full": FULL_GRID}
"""The grids that have names."""

EXPLOSION_RATIO = 1000.0
"""Far above any healthy block: on SmolLM2-135M the first block adds 22 times the embedding, later ones at most 2.2
times the stream, and massive activations of one token 7 times; a flipped top exponent bit adds 1e30 times."""


class AlphaScanPlan(Wire):
    """The grid, the blocks and the validation sequences."""

    model_config = ConfigDict(allow_inf_nan=False)

    alphas: list[float]
    """Factors on a block's contribution, without 1 (the base loss is always measured); 0 leaves it out.
    Empty: only the base loss is measured."""
    tokens: list[list[int]] = Field(min_length=1)
    """N sequences of token ids, unpadded.  Whether an id exists in the vocabulary is the view's to check."""
    scored_from: list[int]
    """Per sequence, the first position whose loss counts, at least 1."""
    tokens_per_step: int = Field(default=512, ge=1)
    """Sequences x alphas x length of one block call is kept at or below this, but never below one sequence."""
    tokens_per_loss: int | None = Field(default=None, ge=1)
    """So many tokens at most go through the head in one step, but never less than one sequence: with a large
    vocabulary the head costs as much as many blocks.  None: all of one block call."""
    blocks: list[int] | None = None
    """Blocks whose losses are measured; None: all."""
    group: int = Field(default=1, ge=1)
    """So many neighbouring blocks are scaled together, as one contribution; 1: each block by itself."""
    left_out: list[int] = Field(default=[])
    """Blocks that the measured model does without, whatever is served."""
    explosion_ratio: float | None = Field(default=EXPLOSION_RATIO, gt=1)
    """A block explodes when what it adds is so many times the stream it adds to (root mean square over the scored
    positions of a sequence).  None: no block does."""
    first_sequence: int = Field(default=0, ge=0)
    """Index of the first sequence in the validation set, of which the plan may hold a part only."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.alphas)) != len(self.alphas) or 1.0 in self.alphas or any(a < 0 for a in self.alphas):
            raise ValueError(f"alphas must be different, not negative and not 1 (always measured): {self.alphas}")
        if len(self.scored_from) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} sequences need as many scored_from, not {len(self.scored_from)}")
        for n, (row, first) in enumerate(zip(self.tokens, self.scored_from, strict=True)):
            if not 1 <= first < len(row):
                raise ValueError(f"sequence {n}: scored_from must lie in 1..{len(row) - 1}, not {first}")
        for name, blocks in (("blocks", self.blocks or []), ("left_out", self.left_out)):
            if blocks != sorted(set(blocks)) or any(block < 0 for block in blocks):
                raise ValueError(f"{name} must be ascending, different and not negative: {blocks}")
        if self.blocks is not None and self.group > 1:
            raise ValueError("blocks and a group larger than 1 exclude each other")
        return self

    @property
    def pass_tokens(self) -> int:
        """Tokens of one forward pass over the sequences, without padding."""
        return sum(len(row) for row in self.tokens)

    @property
    def scored_tokens(self) -> list[int]:
        """(N) scored positions."""
        return [len(row) - first for row, first in zip(self.tokens, self.scored_from, strict=True)]


def alphas_of(grid: str | Sequence[float]) -> list[float]:
    """The alphas of a named grid, or the given ones.  Raises `KeyError` for another name."""
    return list(GRIDS[grid]) if isinstance(grid, str) else [float(alpha) for alpha in grid]


def units(plan: AlphaScanPlan, gates: Sequence[float]) -> list[range]:
    """Runs of blocks that are scaled together, ascending: those of the plan that run at gate 1 and are not left out.

    Raises `ValueError` for a block that the model does not have.
    """
    num_blocks = len(gates)
    for block in [*(plan.blocks or []), *plan.left_out]:
        if block >= num_blocks:
            raise ValueError(f"block {block} does not exist; blocks are 0 to {num_blocks - 1}")
    if not plan.alphas:
        return []
    free = {block for block, gate in enumerate(gates) if gate == 1.0} - set(plan.left_out)
    wanted = free if plan.blocks is None else free & set(plan.blocks)
    runs = [range(start, min(start + plan.group, num_blocks)) for start in range(0, num_blocks, plan.group)]
    return [run for run in runs if wanted.intersection(run)]


def naive_passes(plan: AlphaScanPlan, num_blocks: int) -> int:
    """Forward passes that the plan would take without shared prefixes: one per loss."""
    return 1 + len(plan.alphas) * len(units(plan, [1.0] * num_blocks))


def predicted_passes(plan: AlphaScanPlan, num_blocks: int) -> float:
    """Forward-pass equivalents that the plan takes on a finite model with all gates at 1, but for padding."""
    runs = units(plan, [1.0] * num_blocks)
    without = len(plan.left_out) / num_blocks
    if not runs:
        return 1.0 - without
    walked = range(runs[-1].stop)
    behind = [sum(1 for block in range(run.stop, num_blocks) if block not in plan.left_out) for run in runs]
    prefix = sum(1 for block in walked if block not in plan.left_out)
    return 1.0 - without + (prefix + len(plan.alphas) * sum(behind)) / num_blocks


def pieces(plan: AlphaScanPlan, count: int, width: int) -> list[slice]:
    """How the losses of `count` sequences, padded to `width` tokens, are cut into steps."""
    size = count if plan.tokens_per_loss is None else max(1, plan.tokens_per_loss // width)
    return [slice(start, min(start + size, count)) for start in range(0, count, max(1, size))]


def padded(plan: AlphaScanPlan, rows: Sequence[int]) -> "tuple[Tensor, Tensor]":
    """(N, T) token ids and (N, T) bool of scored positions, right-padded with each row's own last token."""
    import torch

    width = max(len(plan.tokens[row]) for row in rows)
    tokens = torch.tensor([plan.tokens[r] + plan.tokens[r][-1:] * (width - len(plan.tokens[r])) for r in rows])
    at = torch.arange(width)[None, :]
    first = torch.tensor([plan.scored_from[r] for r in rows])[:, None]
    end = torch.tensor([len(plan.tokens[r]) for r in rows])[:, None]
    return tokens, (at >= first) & (at < end)


def chunks(plan: AlphaScanPlan) -> list[list[int]]:
    """Indices of the sequences, longest first, cut so that one batch holds about `tokens_per_step` tokens."""
    order = sorted(range(len(plan.tokens)), key=lambda n: (-len(plan.tokens[n]), n))
    copies = max(1, len(plan.alphas))
    batches: list[list[int]] = []
    while order:
        size = max(1, plan.tokens_per_step // (len(plan.tokens[order[0]]) * copies))
        batches.append(order[:size])
        order = order[size:]
    return batches
