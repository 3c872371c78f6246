"""The blocks of a served model run alone: what their modules hand on, with their own tensors or the checkpoint's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..monitors.differential.facts import STREAM
from ..monitors.differential.view import CleanTensors
from ..monitors.fingerprint.facts import Rank
from .activations import handed_on, holding
from .attention import private_context
from .checkpoint import StoredTensor
from .fresh import fresh_block
from .gates import ungated
from .live_tensor import packed_rows
from .view import LiveView
from .weights import STATE


class LiveDissection(LiveView):
    """See `monitors.differential.view.DissectedView`."""

    def __init__(self, *view: Any, rank: Rank, checkpoint: Mapping[int | None, dict[str, StoredTensor]] | None) -> None:
        """Look at a model as `LiveView` does.

        Args:
            view: What `LiveView` takes.
            rank: Of this worker.
            checkpoint: Where its blocks' tensors lie on the disk; None where nobody asked.
        """
        super().__init__(*view)
        self.rank = rank
        self._checkpoint = checkpoint

    def path(self, index: int) -> str:
        """See `DissectedView.path`."""
        return f"{self._stack.path}.{index}"

    def dissect(
        self, index: int, hidden: Tensor, tokens: Tensor, tensors: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """See `DissectedView.dissect`."""
        layer = self._stack.layers[index]
        args, kwargs = self._call(index, hidden, tokens)
        rows = hidden.shape[0] * hidden.shape[1]
        with (
            private_context(self._vllm_config, tokens.shape[1], skip_compiled=True),
            holding(layer, tensors or {}),
            handed_on(layer, rows) as kept,
        ):
            out = ungated(layer)(layer, *args, **kwargs)
        return {**kept, STREAM: self._forms[index].stream(out).reshape(rows, -1)}

    def tensors(self, index: int) -> dict[str, Tensor]:
        """See `DissectedView.tensors`."""
        layer = self._stack.layers[index]
        named = [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]
        return {name: tensor.detach() for name, tensor in named if name.rpartition(".")[2] not in STATE}

    @torch.inference_mode()
    def clean(self, index: int) -> CleanTensors:
        """See `DissectedView.clean`."""
        if self._checkpoint is None:
            raise ValueError("the checkpoint was not looked for")
        found, missing = fresh_block(self._model, self._vllm_config, self._stack, index, self._checkpoint)
        start = f"{self.path(index)}."
        # Buffers that no checkpoint holds, such as scales of the KV cache, are no weights that it fails to have.
        weights = {start + name for name, _ in self._stack.layers[index].named_parameters(remove_duplicate=False)}
        return CleanTensors(
            {name.removeprefix(start): tensor.to(self._device) for name, tensor in found.items()},
            [f"{name}: {reason}" for name, reason in missing.items() if name in weights],
        )

    def parts(self, index: int, tensor: str) -> list[tuple[str, range]]:
        """See `DissectedView.parts`."""
        return packed_rows(self._model, f"{self.path(index)}.{tensor}")
