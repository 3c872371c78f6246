"""A model whose blocks lie on several pipeline stages, as one.

All ranks run the same measurement in step.  The stage that holds a block computes it and broadcasts the stream, so
that every rank sees the same numbers and takes the same way; the last stage computes the losses.  Stages wait for each
other, as they do for one batch of requests.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .attention import private_context
from .forms import run_model
from .ranks import Ranks
from .stack import UnsupportedModel
from .view import LiveView


class PipelinedView:
    """See `monitors.monitor.ModelView`.  Every rank has one, and every call is made on all of them."""

    def __init__(self, part: LiveView, ranks: Ranks, vllm_config: Any, device: torch.device) -> None:
        """Look at all stages.  Made on all ranks at once.

        Args:
            part: The view of the blocks that this rank holds.
            ranks: Who holds the others.
            vllm_config: Of the whole.
            device: Where this rank's part lives.

        Raises:
            UnsupportedModel: a block lies on no stage.
        """
        self.num_blocks = part.num_blocks
        self._part = part
        self._ranks = ranks
        self._last = ranks.stages - 1
        self._stream = _stream(vllm_config, device)
        held = ranks.gathered((ranks.stage, list(part.alphas())))
        self._stage = {block: stage for stage, blocks in held for block in blocks}
        if missing := [block for block in range(self.num_blocks) if block not in self._stage]:
            raise UnsupportedModel(f"Block {missing[0]} lies on no stage of the pipeline.")

    @property
    def gates(self) -> list[float]:
        """Alpha per block, from the devices; where the views have their own, those."""
        alphas: dict[int, float] = {}
        for of_rank in self._ranks.gathered(self._part.alphas()):
            alphas.update(of_rank)
        return [alphas[block] for block in range(self.num_blocks)]

    def embed(self, tokens: Tensor) -> Tensor:
        """See `ModelView.embed`."""
        like = self._stream.expand(*tokens.shape, -1)
        return self._ranks.share(0, like, lambda: self._part.embed(tokens))

    def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `ModelView.block`."""
        return self._ranks.share(self._stage[index], hidden, lambda: self._part.block(index, hidden, tokens))

    def nats(self, hidden: Tensor, tokens: Tensor, scored: Tensor) -> Tensor:
        """See `ModelView.nats`."""
        like = torch.empty(hidden.shape[0], dtype=torch.float64, device=hidden.device)
        return self._ranks.share(self._last, like, lambda: self._part.nats(hidden, tokens, scored))

    def finish(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `LiveView.finish`."""
        like = hidden.reshape(-1, hidden.shape[-1])
        return self._ranks.share(self._last, like, lambda: self._part.finish(hidden, tokens))


def run_served(model: Any, tokens: Tensor, ranks: Ranks, vllm_config: Any) -> Tensor:
    """(M, T) token ids -> (M*T, D) hidden state behind the final norm, by the code that serves, on every rank.

    The stages of the pipeline one after the other; what one hands to the next goes to all ranks.  Called on all ranks.
    """

    def run(incoming: Any) -> Any:
        with private_context(vllm_config, tokens.shape[1], skip_compiled=False):
            return run_model(model, tokens, incoming)

    if ranks.stages == 1:
        return run(None)  # type: ignore[no-any-return]
    from vllm.sequence import IntermediateTensors

    rows, device = tokens.numel(), tokens.device
    empty = model.make_empty_intermediate_tensors(rows, vllm_config.model_config.dtype, device).tensors
    incoming = None
    for stage in range(ranks.stages - 1):
        sent: dict[str, Tensor] = run(incoming).tensors if stage == ranks.stage else {}
        handed_on = {
            name: ranks.share(stage, like, partial(sent.__getitem__, name)) for name, like in sorted(empty.items())
        }
        incoming = IntermediateTensors(handed_on)
    like = _stream(vllm_config, device).expand(rows, -1)
    return ranks.share(ranks.stages - 1, like, lambda: run(incoming))


def _stream(vllm_config: Any, device: torch.device) -> Tensor:
    """(1, D) in the type of the residual stream."""
    config = vllm_config.model_config
    return torch.empty(1, config.get_hidden_size(), dtype=config.dtype, device=device)
