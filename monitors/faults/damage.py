"""A fault on a tensor: what it would write, and doing it with a way back."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .bits import bits, flat, read, write
from .spec import FaultKind, FaultSpec
from .strikes import STRIKES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Damage:
    """What a fault would write into a tensor, and where."""

    where: "Tensor | range"
    """Flat indices, each once: 1-D int64 on the tensor's device, or a range where they are consecutive."""
    after: "Tensor"
    """The values to write, as many, in the tensor's dtype."""

    @property
    def indices(self) -> "Tensor":
        """The flat indices as a 1-D int64 tensor."""
        return flat(self.where, self.after.device)


def damage(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None" = None) -> Damage:
    """What `spec` does to `tensor`, which stays as it is.

    Large values stop at the ends of the dtype's finite range.

    Args:
        spec: The fault.
        tensor: Any shape, floating point or integer.
        source: The other tensor, of the same dtype, for a stale page only.

    Raises:
        ValueError: the fault makes no sense for this tensor, or would change nothing; the text says why.
    """
    import torch

    if tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.is_complex():
        raise ValueError(f"A tensor of {tensor.numel()} values of {tensor.dtype} cannot be damaged.")
    if (source is not None) != (spec.kind is FaultKind.STALE):
        raise ValueError("A stale page needs the tensor that it is copied from, and no other kind takes one.")
    with torch.no_grad():
        generator = random.Random(spec.seed)  # noqa: S311 - reproducible, not secret
        made = Damage(*STRIKES[spec.kind](spec, tensor.detach(), source, generator))
    if torch.equal(read(tensor, made.where), bits(made.after)):
        raise ValueError(f"This fault ({spec.kind}) changes no value of the tensor; take another seed or kind.")
    return made


def inject(spec: FaultSpec, tensor: "Tensor", source: "Tensor | None" = None) -> Callable[[], None]:
    """Damage `tensor` in place; the returned function puts every bit back.

    Faults that overlap must be undone in reverse order.  Raises `ValueError` as `damage` does.
    """
    made = damage(spec, tensor, source)
    before = read(tensor, made.where)
    write(tensor, made.where, made.after)
    return lambda: write(tensor, made.where, before)
