"""Do the gates act, and rightly, in the very code that serves?

Compiled code may ignore a gate without a word (loaded from a stale cache, or with the gate folded to a constant), or
hand on something else than the block's input (a compile pass that drops the copy).  The trial runs the model as it
serves (compiled, if it is) on a few tokens, first with every block skipped, then with each block alone.  Each output
must differ from the first, and must be what the live view computes block by block.  Skipping all others makes the
answer independent of a block that is broken.  Gates are set only inside one step and put back in the same step.

All ranks try the same gate at once: tensor-parallel ones share the layers, and a pipeline computes stage by stage.
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from .armed import Armed
from .forms import rehearsal_tokens
from .gates import Gates
from .pipeline import run_served
from .ranks import Ranks
from .view import SAME, relative_distance


def try_gates(armed: Armed, gates: Gates) -> Generator[None, None, dict[str, Any]]:
    """Yields after each trial.

    Returns:
        `inert`: blocks whose gate changed nothing.  `wrong`: blocks alone with which the output is not what the view
        computes; -1 stands for no block at all.
    """
    tokens = rehearsal_tokens(armed.vllm_config, armed.device)
    everything_skipped = dict.fromkeys(range(armed.stack.num_blocks), 0.0)
    ranks = Ranks.here()
    # One rank's refusal counts for all: they must go the same way.
    view = None if any(ranks.gathered(armed.scan_refusal)) else armed.view()

    def served(alphas: dict[int, float]) -> Tensor:
        with gates.temporarily({**everything_skipped, **alphas}):
            # A copy, since compiled code may reuse its output.
            return run_served(armed.model, tokens, ranks, armed.vllm_config).clone()

    def is_right(output: Tensor, block: int | None) -> bool:
        if view is None:
            return True
        with gates.temporarily({} if block is None else {block: 1.0}):
            hidden = view.embed(tokens)
            if block is not None:
                hidden = view.block(block, hidden, tokens)
            expected = view.finish(hidden, tokens)
        if not expected.isfinite().all():
            return not output.isfinite().all()
        return relative_distance(output, expected) < SAME

    nothing = served({})
    inert, wrong = [], [] if is_right(nothing, None) else [-1]
    yield
    for block in range(armed.stack.num_blocks):
        alone = served({block: 1.0})
        # Bits, not values: NaN differs from NaN.
        if torch.equal(alone.view(torch.uint8), nothing.view(torch.uint8)):
            inert.append(block)
        elif not is_right(alone, block):
            wrong.append(block)
        yield
    return {"inert": inert, "wrong": wrong}
