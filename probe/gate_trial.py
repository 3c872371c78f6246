"""Do the gates act in the very code that serves?

Compiled code may ignore a gate without a word: loaded from a stale cache, or with the gate folded to a constant.  The
test runs the model as it serves (compiled, if it is) on a few tokens, first with every block skipped, then with each
block alone: the output must change for every block.  Skipping all others makes the answer independent of a block that
is broken.  It sets gates only inside one step and puts them back in the same step.
"""

from collections.abc import Generator
from typing import Any

import torch

from .armed import Armed
from .attention import private_context
from .forms import REHEARSAL_TOKENS, run_model
from .gates import Gates


def try_gates(armed: Armed, gates: Gates) -> Generator[None, None, dict[str, Any]]:
    """Yields after each small forward pass; returns `{"inert": [blocks whose gate changed nothing]}`."""
    tokens = torch.arange(1, 1 + REHEARSAL_TOKENS, device=armed.device)[None]
    everything_skipped = dict.fromkeys(range(armed.stack.num_blocks), 0.0)

    def output(alphas: dict[int, float]) -> torch.Tensor:
        with (
            gates.temporarily({**everything_skipped, **alphas}),
            private_context(armed.vllm_config, REHEARSAL_TOKENS, skip_compiled=False),
        ):
            # Bits, not values: NaN differs from NaN.  A copy, since compiled code may reuse its output.
            return run_model(armed.model, tokens).clone().view(torch.uint8)

    nothing = output({})
    yield
    inert = []
    for block in range(armed.stack.num_blocks):
        if torch.equal(output({block: 1.0}), nothing):
            inert.append(block)
        yield
    return {"inert": inert}
