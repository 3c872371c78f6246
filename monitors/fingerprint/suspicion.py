"""Values that no trained weight has: a baseline of them would approve a model that was loaded damaged."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ABSURD = 2.0**14
"""Larger magnitudes are absurd.  Trained weights lie below 10, norm weights below some hundreds; the 18 values that
broke a published shard of OPT-175B went up to 50,000."""

# 8-bit floats have no arithmetic of their own: widened in slices, not whole.
_SLICE = 2**22


def suspicion(name: str, tensor: "Tensor") -> list[str]:
    """What is wrong with the values of a parameter, a sentence, or nothing.

    Buffers may hold anything (masks hold -Inf), and integers are codes: of both nothing is said; nor of packs of 4-bit
    floats, which torch cannot read and of which none is absurd.
    """
    import torch

    floating = tensor.is_floating_point() and tensor.dtype != torch.float4_e2m1fn_x2
    if not (isinstance(tensor, torch.nn.Parameter) and floating):
        return []
    odd = sum(_odd(part) for part in _slices(tensor.detach()))
    if not odd:
        return []
    return [f"{odd} of {tensor.numel()} values of {name} are not finite, or beyond {ABSURD:g}."]


def _slices(tensor: "Tensor") -> list["Tensor"]:
    if tensor.element_size() > 1:
        return [tensor]
    return [part.float() for part in tensor.reshape(-1).split(_SLICE)]  # type: ignore[no-untyped-call]


def _odd(tensor: "Tensor") -> int:
    low, high = tensor.aminmax()
    # NaN comes through both ends, and every comparison with it is false.
    if bool((low >= -ABSURD) & (high <= ABSURD)):
        return 0
    return int((~(tensor.abs() <= ABSURD)).sum())
