"""alpha-scan: scales each block's contribution in turn and watches the loss.

Which fault: a block whose weights are damaged so that what it adds to the residual stream does harm.

Formulas (design section 2; the method is BitFlipScope, arXiv 2512.22174, as restated in `method.md`).  `L(l, a)` is
the mean loss in nats per scored token of the model in which block `l` adds `a * F_l(h)` instead of `F_l(h)`:

    BSS                sqrt(sum over alpha of (L(l, alpha) - L(1))^2), alpha = 0 left out
    slope              (L(l, 1 + d) - L(l, 1 - d)) / 2d, smallest d of the grid
    skip gain          L(1) - L(l, 0)
    largest deviation  max over alpha of |L(l, alpha) - L(1)|, alpha = 0 left out

Cost: `2 + |A| * (L - 1) / 2` forward passes over the validation set for `|A|` alphas and `L` blocks: one pass for the
base loss, one that walks the prefix, and for block `l` only the blocks behind it, all alphas in one batch.

What it cannot see: a block that the model cannot do without (always the first, sometimes the last) costs more
when left out than damaged, so its skip gain stays negative; damage that the validation set does not exercise;
damage outside the blocks (embedding, final norm, head) beyond the base loss; a block that is gated already.
"""

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator

from .alpha_scan_judgement import AlphaScanFinding, AlphaScanReading, BlockScore, judge
from .monitor import ModelView, Monitor
from .wire import Wire

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FULL_GRID",
    "QUICK_GRID",
    "AlphaScan",
    "AlphaScanFinding",
    "AlphaScanPlan",
    "AlphaScanReading",
    "BlockScore",
    "chunks",
    "padded",
]

FULL_GRID = (0.0, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.4)
"""The published grid, and 0: scaling cannot undo saturation or NaN, leaving the block out can."""

QUICK_GRID = (0.0, 0.7, 1.3)


class AlphaScanPlan(Wire):
    """What one scan runs: the grid and the validation sequences."""

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

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.alphas)) != len(self.alphas) or 1.0 in self.alphas or any(a < 0 for a in self.alphas):
            raise ValueError(f"alphas must be different, not negative and not 1 (always measured): {self.alphas}")
        if len(self.scored_from) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} sequences need as many scored_from, not {len(self.scored_from)}")
        for n, (row, first) in enumerate(zip(self.tokens, self.scored_from, strict=True)):
            if not 1 <= first < len(row):
                raise ValueError(f"sequence {n}: scored_from must lie in 1..{len(row) - 1}, not {first}")
        return self


class AlphaScan(Monitor[AlphaScanPlan, AlphaScanReading, AlphaScanFinding]):
    """Reference-free localisation of a harmful block.

    Args:
        tau: blocks other than the most harmful one need a robust z of the skip gain over this.
        min_gain_nats: leaving a harmful block out wins at least so much.
    """

    name: ClassVar[str] = "alpha_scan"
    plan_type = AlphaScanPlan

    def __init__(self, tau: float = 6.0, min_gain_nats: float = 0.05) -> None:
        self.tau = tau
        self.min_gain_nats = min_gain_nats

    def steps(self, plan: AlphaScanPlan, num_blocks: int) -> int:
        """How often `measure` yields on a finite model of `num_blocks` blocks with all gates at 1.

        A unit is one block call or one loss.  Fewer when blocks are gated or not finite, never more.
        """
        per_chunk = num_blocks + 1
        if plan.alphas:
            per_chunk += num_blocks + num_blocks * (num_blocks + 1) // 2
        return per_chunk * len(chunks(plan))

    def measure(self, model: ModelView, plan: AlphaScanPlan) -> Generator[None, None, AlphaScanReading]:
        """Base loss and non-finite blocks in a first pass, then each block's losses.

        A model with a non-finite block has no curves: only the first pass runs, and it names all such blocks.
        Only the hidden states of one chunk are held.
        """
        tally = _Tally(plan, model.num_blocks)
        gates = list(model.gates)
        batches = chunks(plan)
        attributable = True
        for rows in batches:
            attributable &= yield from _base_pass(model, plan, rows, tally)
        if plan.alphas and attributable and not tally.nonfinite_blocks:
            for block, gate in enumerate(gates):
                if gate == 1.0:
                    tally.nats[block] = [[None] * len(plan.tokens) for _ in plan.alphas]
            for rows in batches:
                yield from _scan_pass(model, plan, rows, gates, tally)
        return tally.reading(gates)

    def judge(self, reading: AlphaScanReading) -> AlphaScanFinding:
        """Flag the blocks without which the model is better, by a wide margin.  See `alpha_scan_judgement`."""
        return judge(reading, self.tau, self.min_gain_nats)


class _Tally:
    """What has been measured so far, sequences in the plan's order."""

    def __init__(self, plan: AlphaScanPlan, num_blocks: int) -> None:
        self.plan = plan
        self.base_nats: list[float | None] = [None] * len(plan.tokens)
        self.nats: list[list[list[float | None]]] = [[] for _ in range(num_blocks)]
        self.nonfinite_blocks: set[int] = set()
        self._block_tokens = 0
        self._pass_tokens = num_blocks * sum(len(row) for row in plan.tokens)

    def count(self, hidden: "Tensor") -> None:
        """One block call on `hidden` (M, T, D)."""
        self._block_tokens += hidden.shape[0] * hidden.shape[1]

    def reading(self, gates: list[float]) -> AlphaScanReading:
        return AlphaScanReading(
            alphas=self.plan.alphas,
            gates=gates,
            scored_tokens=[len(r) - first for r, first in zip(self.plan.tokens, self.plan.scored_from, strict=True)],
            base_nats=self.base_nats,
            nats=self.nats,
            nonfinite_blocks=sorted(self.nonfinite_blocks),
            passes=self._block_tokens / self._pass_tokens,
        )


def _base_pass(model: ModelView, plan: AlphaScanPlan, rows: list[int], tally: _Tally) -> Generator[None, None, bool]:
    """The model as served over one chunk.  Returns whether the embedding was finite.

    A block whose output is not finite where its input was is named and, for those sequences, left out, so that
    one pass finds all such blocks.
    """
    import torch

    tokens, scored = padded(plan, rows)
    h = model.embed(tokens)  # (N, T, D)
    tokens, scored = tokens.to(h.device), scored.to(h.device)
    clean = _finite_rows(h)
    as_served = clean
    for block in range(model.num_blocks):
        out = model.block(block, h, tokens)
        finite = _finite_rows(out)
        if bool((clean & ~finite).any()):
            tally.nonfinite_blocks.add(block)
        as_served = as_served & finite
        h = torch.where(finite[:, None, None], out, h)
        tally.count(h)
        yield
    nats = model.nats(h, tokens, scored)
    for row, value, served in zip(rows, nats.tolist(), as_served.tolist(), strict=True):
        tally.base_nats[row] = value if served and math.isfinite(value) else None
    yield
    return bool(clean.all())


def _scan_pass(
    model: ModelView, plan: AlphaScanPlan, rows: list[int], gates: Sequence[float], tally: _Tally
) -> Generator[None, None, None]:
    """All blocks and alphas over one chunk, the prefix state carried along."""
    tokens, scored = padded(plan, rows)
    h = model.embed(tokens)  # (N, T, D)
    tokens, scored = tokens.to(h.device), scored.to(h.device)
    for block, gate in enumerate(gates):
        out = model.block(block, h, tokens)
        tally.count(h)
        yield
        if gate == 1.0:
            mixed = _mix(h, out, plan.alphas)  # (A * N, T, D), copy-major
            for behind in range(block + 1, model.num_blocks):
                mixed = model.block(behind, mixed, tokens)
                tally.count(mixed)
                yield
            nats = model.nats(mixed, tokens, scored).reshape(len(plan.alphas), len(rows))
            for a, losses in enumerate(nats.tolist()):
                for row, value in zip(rows, losses, strict=True):
                    tally.nats[block][a][row] = value if math.isfinite(value) else None
            del mixed
            yield
        h = out


def _mix(h: "Tensor", out: "Tensor", alphas: Sequence[float]) -> "Tensor":
    """(N, T, D) stream before and behind a block -> (A * N, T, D), `h + alpha * (out - h)` for each alpha.

    In float32, back in the stream's dtype.  Alpha 0 takes `h` itself: 0 * Inf would be NaN.
    """
    import torch

    base = h.float()
    contribution = out.float() - base
    return torch.cat([h if alpha == 0.0 else (base + alpha * contribution).to(h.dtype) for alpha in alphas])


def _finite_rows(hidden: "Tensor") -> "Tensor":
    """(N, T, D) -> (N,) bool: every value of the sequence is finite."""
    return hidden.isfinite().flatten(1).all(dim=1)


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
