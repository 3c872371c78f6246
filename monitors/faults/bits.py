"""Reads and writes of single values of a tensor as bits, so that NaN payloads and -0.0 come back as they were."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def read(tensor: "Tensor", where: "Tensor | range") -> "Tensor":
    """A copy of the values at these flat indices, as integers of the same width: bits that no arithmetic touches."""
    whole = bits(tensor.detach())
    if isinstance(where, range):
        return whole.reshape(-1)[where.start : where.stop].clone()
    return whole.take(where)


def write(tensor: "Tensor", where: "Tensor | range", values: "Tensor") -> None:
    """Put values, or their bits as `read` gives them, at these flat indices."""
    whole = bits(tensor.detach())
    if isinstance(where, range) and whole.is_contiguous():
        whole.view(-1)[where.start : where.stop] = bits(values)
    else:
        # Also right where the tensor's memory is laid out in another order.
        whole.put_(flat(where, values.device), bits(values))


def flat(where: "Tensor | range", device: "torch.device") -> "Tensor":
    """The indices as a 1-D int64 tensor."""
    import torch

    return torch.arange(where.start, where.stop, device=device) if isinstance(where, range) else where


def bits(tensor: "Tensor") -> "Tensor":
    """The same memory as integers of the same width."""
    import torch

    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
