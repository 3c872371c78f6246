"""The blocks of a Hugging Face model in this process run alone: what their modules hand on."""

from collections.abc import Mapping

from torch import Tensor

from ..monitors.differential.facts import STREAM
from ..monitors.differential.view import CleanTensors
from ..monitors.fingerprint.facts import Rank
from .activations import handed_on, holding
from .hardware import hardware
from .local import LocalView, stream_of


class LocalDissection(LocalView):
    """See `monitors.differential.view.DissectedView`.  It knows no checkpoint but the one it was loaded from."""

    rank = Rank(rank=0)

    @property
    def hardware(self) -> str:
        """What computes, see `hardware`."""
        return hardware(next(self.model.parameters()).device)

    def path(self, index: int) -> str:
        """See `DissectedView.path`."""
        return f"{self.layers_name}.{index}"

    def dissect(
        self, index: int, hidden: Tensor, tokens: Tensor, tensors: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """See `DissectedView.dissect`."""
        layer = self.layers[index]
        args, kwargs = self._calls_at(tokens, hidden.shape[0])[index]
        rows = hidden.shape[0] * hidden.shape[1]
        with holding(layer, tensors or {}), handed_on(layer, rows) as kept:
            out = layer(hidden, *args, **kwargs)
        return {**kept, STREAM: stream_of(out).reshape(rows, -1)}

    def tensors(self, index: int) -> dict[str, Tensor]:
        """See `DissectedView.tensors`."""
        layer = self.layers[index]
        return {name: tensor.detach() for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]}

    def clean(self, index: int) -> CleanTensors:
        """Always a `ValueError`."""
        raise ValueError("this model has no checkpoint but the one it was loaded from: compare it with another one")

    def parts(self, index: int, tensor: str) -> list[tuple[str, range]]:
        """Hugging Face packs nothing that it names."""
        return []
