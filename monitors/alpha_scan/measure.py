"""The measuring half: the losses of a plan, on live weights."""

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from ..monitor import ModelView
from .plan import AlphaScanPlan, chunks, padded, pieces, units
from .reading import AlphaScanReading

if TYPE_CHECKING:
    from torch import Tensor

Steps = Generator[None, None, None]


def steps(plan: AlphaScanPlan, num_blocks: int) -> int:
    """How often `measure` yields on a finite model of `num_blocks` blocks with all gates at 1.

    A unit is one block call, or one loss or a piece of it.  Fewer when blocks are gated, explode or are not finite,
    never more.
    Raises `ValueError` for a plan that names a block which is not there.
    """
    runs = units(plan, [1.0] * num_blocks)
    calls = num_blocks
    if runs:
        calls += runs[-1].stop + sum(num_blocks - run.stop for run in runs)
    total = 0
    for rows in chunks(plan):
        # The longest comes first.
        width = len(plan.tokens[rows[0]])
        total += calls + len(pieces(plan, len(rows), width))
        total += len(runs) * len(pieces(plan, len(plan.alphas) * len(rows), width))
    return total


def measure(model: ModelView, plan: AlphaScanPlan) -> Generator[None, None, AlphaScanReading]:
    """Base loss, non-finite and exploding blocks in a first pass, then the losses of each unit.

    A model with such a block has no curves: only the first pass runs, and it names all of them.
    Only the hidden states of one chunk are held.
    """
    view = _Mitigated(model, plan.left_out)
    runs = units(plan, model.gates)
    tally = _Tally(plan, model.num_blocks)
    batches = chunks(plan)
    # Behind an exploding block there is a second pass, in place of curves: where none are wanted, nobody looks for one.
    ratio = plan.explosion_ratio if runs else None
    for rows in batches:
        yield from _base_pass(view, plan, rows, ratio, tally)
    if tally.embedding_is_finite and not tally.nonfinite_blocks and not tally.exploding_blocks:
        for run in runs:
            tally.nats[run.start] = [[None] * len(plan.tokens) for _ in plan.alphas]
        for rows in batches if runs else []:
            yield from _scan_pass(view, plan, rows, runs, tally)
    return AlphaScanReading(
        alphas=plan.alphas,
        gates=model.gates,
        left_out=plan.left_out,
        group=plan.group,
        first_sequence=plan.first_sequence,
        scored_tokens=plan.scored_tokens,
        pass_tokens=plan.pass_tokens,
        base_nats=tally.base_nats,
        nats=tally.nats,
        nonfinite_blocks=sorted(tally.nonfinite_blocks),
        exploding_blocks=sorted(tally.exploding_blocks),
        passes=view.block_tokens / (model.num_blocks * plan.pass_tokens),
    )


class _Mitigated:
    """The model without some blocks; counts the tokens that go through the others."""

    def __init__(self, model: ModelView, left_out: Sequence[int]) -> None:
        self.model = model
        self.num_blocks = model.num_blocks
        self.block_tokens = 0
        self._left_out = frozenset(left_out)

    def block(self, index: int, hidden: "Tensor", tokens: "Tensor") -> "Tensor":
        if index in self._left_out:
            return hidden
        self.block_tokens += hidden.shape[0] * hidden.shape[1]
        return self.model.block(index, hidden, tokens)


class _Tally:
    """What has been measured so far, sequences in the plan's order."""

    def __init__(self, plan: AlphaScanPlan, num_blocks: int) -> None:
        self.base_nats: list[float | None] = [None] * len(plan.tokens)
        self.nats: list[list[list[float | None]]] = [[] for _ in range(num_blocks)]
        self.nonfinite_blocks: set[int] = set()
        self.exploding_blocks: set[int] = set()
        self.embedding_is_finite = True


def _base_pass(view: _Mitigated, plan: AlphaScanPlan, rows: list[int], ratio: float | None, tally: _Tally) -> Steps:
    """The model as served over one chunk.

    A block whose output is not finite where its input was, or which adds far more than there was, is named and, for
    those sequences, left out, so that one pass finds all such blocks.  Behind an exploding block the loss as served
    needs a pass of its own.
    """
    import torch

    tokens, scored = padded(plan, rows)
    h = view.model.embed(tokens)  # (N, T, D)
    tokens, scored = tokens.to(h.device), scored.to(h.device)
    embedded = h
    sound = _finite_rows(h)
    tally.embedding_is_finite &= bool(sound.all())
    as_served = sound
    exploded = torch.zeros_like(sound)
    for block in range(view.num_blocks):
        out = view.block(block, h, tokens)
        finite = _finite_rows(out)
        if bool((sound & ~finite).any()):
            tally.nonfinite_blocks.add(block)
        as_served = as_served & finite
        leave = ~finite
        if ratio is not None:
            explodes = sound & finite & (_growth(h, out, scored) > ratio)
            if bool(explodes.any()):
                tally.exploding_blocks.add(block)
            exploded = exploded | explodes
            leave = leave | explodes
        h = torch.where(leave[:, None, None], h, out)
        yield
    if bool((exploded & as_served).any()):
        h = embedded
        for block in range(view.num_blocks):
            h = view.block(block, h, tokens)
            yield
        as_served = as_served & _finite_rows(h)
    nats = yield from _nats(view, plan, h, tokens, scored)
    for row, value, served in zip(rows, nats.tolist(), as_served.tolist(), strict=True):
        tally.base_nats[row] = value if served and math.isfinite(value) else None


def _scan_pass(view: _Mitigated, plan: AlphaScanPlan, rows: list[int], runs: list[range], tally: _Tally) -> Steps:
    """All units and alphas over one chunk, the prefix state carried along."""
    tokens, scored = padded(plan, rows)
    h = view.model.embed(tokens)  # (N, T, D)
    tokens, scored = tokens.to(h.device), scored.to(h.device)
    done = 0
    for run in runs:
        for block in range(done, run.start):
            h = view.block(block, h, tokens)
            yield
        out = h
        for block in run:
            out = view.block(block, out, tokens)
            yield
        mixed = _mix(h, out, plan.alphas)  # (A * N, T, D), copy-major
        for behind in range(run.stop, view.num_blocks):
            mixed = view.block(behind, mixed, tokens)
            yield
        nats = yield from _nats(view, plan, mixed, tokens, scored)
        del mixed
        for a, losses in enumerate(nats.reshape(len(plan.alphas), len(rows)).tolist()):
            for row, value in zip(rows, losses, strict=True):
                tally.nats[run.start][a][row] = value if math.isfinite(value) else None
        h, done = out, run.stop


def _nats(
    view: _Mitigated, plan: AlphaScanPlan, hidden: "Tensor", tokens: "Tensor", scored: "Tensor"
) -> Generator[None, None, "Tensor"]:
    """(M, T, D) behind the last block -> (M,) losses; yields after each piece."""
    import torch

    cut = pieces(plan, hidden.shape[0], tokens.shape[1])
    if len(cut) > 1:
        # A piece may begin in the middle of a copy, so each sequence gets tokens of its own.
        copies = hidden.shape[0] // tokens.shape[0]
        tokens, scored = tokens.repeat(copies, 1), scored.repeat(copies, 1)
    found = []
    for piece in cut:
        whole = len(cut) == 1
        at = (hidden, tokens, scored) if whole else (hidden[piece], tokens[piece], scored[piece])
        found.append(view.model.nats(*at))
        yield
    return torch.cat(found)


def _mix(h: "Tensor", out: "Tensor", alphas: Sequence[float]) -> "Tensor":
    """(N, T, D) stream before and behind a unit -> (A * N, T, D), `h + alpha * (out - h)` for each alpha.

    In float32, back in the stream's dtype.  Alpha 0 takes `h` itself: 0 * Inf would be NaN.
    """
    import torch

    base = h.float()
    contribution = out.float() - base
    return torch.cat([h if alpha == 0.0 else (base + alpha * contribution).to(h.dtype) for alpha in alphas])


def _finite_rows(hidden: "Tensor") -> "Tensor":
    """(N, T, D) -> (N,) bool: every value of the sequence is finite."""
    return hidden.isfinite().flatten(1).all(dim=1)


def _growth(h: "Tensor", out: "Tensor", scored: "Tensor") -> "Tensor":
    """(N, T, D) stream before and behind a block -> (N,) root mean square of what it adds over that of the stream.

    Over the scored positions: the first position of a sequence carries massive activations in healthy models.
    A square that overflows is Inf, which is more than any ratio.
    """
    before = h.float()
    added = (out.float() - before).square().mean(-1).where(scored, 0.0).sum(1)
    stream = before.square().mean(-1).where(scored, 0.0).sum(1)
    return (added / stream.clamp_min(1e-30)).sqrt()
