"""Slopes of all blocks from one backward pass: the first order of the alpha-scan.

With `h <- h + alpha_l F_l(h)` the loss is a function of all alphas, and its derivative for each of them at alpha 1
comes out of one backward pass.  That is what the alpha-scan's slope estimates by a finite difference, with two more
losses per block.  A slope sees a block whose scale is wrong; it is blind where the loss saturates, and says nothing
of what leaving the block out would win.

Only the local engine can do this: vLLM runs its model under inference mode, and its kernels have no backward.
"""

import torch
from torch import Tensor

from ..monitors.alpha_scan import AlphaScanPlan, chunks, padded
from .local import LocalView

PASSES = 3.0
"""Forward-pass equivalents: one forward, and the usual two for a backward.  It takes less, since no gradient of a
weight is computed.  Memory is what it costs: the activations of all blocks are kept."""


def slopes(view: LocalView, plan: AlphaScanPlan) -> list[list[float]]:
    """Block x N, dL/dalpha at alpha = 1 in nats per unit alpha; N sequences in the plan's order.

    Of the plan count the sequences, what is scored in them, `left_out` and `tokens_per_step`.  A block that is left out
    has slope 0, as has one with a gate of 0.  Not a number where the loss is none.
    """
    found = [[0.0] * len(plan.tokens) for _ in range(view.num_blocks)]
    with torch.inference_mode(False), torch.enable_grad():
        # Not the caller's view: it may hold tensors made under inference mode, which autograd refuses.
        own = LocalView(view.model)
        own.gates = list(view.gates)
        for rows in chunks(plan.model_copy(update={"alphas": []})):
            for block, of_block in enumerate(_gradient(own, plan, rows).tolist()):
                for row, slope in zip(rows, of_block, strict=True):
                    found[block][row] = slope
    return found


def _gradient(view: LocalView, plan: AlphaScanPlan, rows: list[int]) -> Tensor:
    """(blocks, N) slopes of one chunk."""
    tokens, scored = padded(plan, rows)
    hidden = view.embed(tokens).detach()  # (N, T, D)
    alphas = torch.ones(view.num_blocks, len(rows), 1, 1, device=hidden.device, requires_grad=True)
    for block in range(view.num_blocks):
        if block not in plan.left_out:
            hidden = _scaled(hidden, view.block(block, hidden, tokens), alphas[block])
    # A sequence's loss depends on its own alphas only, so the sum gives the slopes of each.
    (gradient,) = torch.autograd.grad(view.nats(hidden, tokens, scored).sum(), alphas)
    return gradient[..., 0, 0]


def _scaled(before: Tensor, behind: Tensor, alpha: Tensor) -> Tensor:
    """(N, T, D) stream in front of and behind a block, (N, 1, 1) ones -> the stream behind it, to the last bit."""
    return behind + ((alpha - 1.0) * (behind - before)).to(behind.dtype)
