"""What the differential monitor sees of a model, beside `ModelView`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..fingerprint.facts import Rank
from ..monitor import ModelView

if TYPE_CHECKING:
    from torch import Tensor


class CleanTensors(NamedTuple):
    """What the checkpoint has for one block."""

    tensors: "dict[str, Tensor]"
    """By the name inside the block; shape, strides and type of the live one, on its device."""
    missing: list[str]
    """Why others of the block cannot be had, a sentence each."""


class DissectedView(ModelView, Protocol):
    """A live model whose blocks can be run alone and looked into."""

    rank: Rank
    """Whose part of the model this is."""

    def path(self, index: int) -> str:
        """Full name of a block in the model."""
        ...

    def dissect(
        self, index: int, hidden: "Tensor", tokens: "Tensor", tensors: "Mapping[str, Tensor] | None" = None
    ) -> "dict[str, Tensor]":
        """(M, T, D) in front of block `index` -> what its modules hand on, the block alone and its gate taken as 1.

        By the path inside the block, in the order in which they hand on; `STREAM` is the last.  Each is (M * T, W), a
        row per token.  With `tensors`, these stand in for the block's own of those names.
        """
        ...

    def tensors(self, index: int) -> "dict[str, Tensor]":
        """Parameters and buffers of a block as they lie in memory, by the name inside it."""
        ...

    def clean(self, index: int) -> CleanTensors:
        """The checkpoint's values of them.

        Raises:
            ValueError: there is no checkpoint behind this model, or it cannot be used; one sentence.
        """
        ...

    def parts(self, index: int, tensor: str) -> list[tuple[str, range]]:
        """Names and rows of the projections that are packed in a tensor; none where it is not packed."""
        ...
