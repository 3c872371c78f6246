"""Which bits of a model's weights would hurt most, to first order: |gradient x change|, from one backward pass."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# So many flips of each tensor and bit are candidates.
_PER_GROUP = 8
# Lower bits of the mantissa change a value by less than 1/16 of itself.
_MANTISSA_BITS = 3


class Flip(NamedTuple):
    """One bit of one value of one tensor, which is named by its flat index."""

    tensor: str
    at: int
    bit: int


def candidates(model: nn.Module, names: list[str], tokens: Tensor, scored: Tensor, in_range: bool) -> list[list[Flip]]:
    """Groups of the best flips to first order, best first; the best group first.

    A group is a tensor and bit: what a top exponent bit does is too large to be compared with what others do.  In
    range, changes are small enough for one group per tensor with each value once, and for their sign: flips that would
    lower the loss are none.

    Args:
        model: A Hugging Face causal LM.
        names: The parameters to look at.
        tokens: (N, T) token ids.
        scored: (N, T) bool, which positions count.
        in_range: Only flips after which a value still lies between its tensor's smallest and largest.
    """
    gradients = _gradients(model, names, tokens, scored)
    groups: list[list[tuple[float, Flip]]] = []
    for name, parameter in model.named_parameters():
        if name not in gradients:
            continue
        values, gradient = parameter.detach().reshape(-1), gradients[name].reshape(-1)
        width = values.element_size() * 8
        whole = values.view({16: torch.int16, 32: torch.int32}[width])
        low, high = values.aminmax()
        mantissa = -round(math.log2(torch.finfo(values.dtype).eps))
        by_bit = []
        for bit in range(mantissa - _MANTISSA_BITS, width):
            after = (whole ^ (-(1 << bit) if bit == width - 1 else 1 << bit)).view(values.dtype)
            score = (after.float() - values.float()) * gradient
            if in_range:
                score[(after < low) | (after > high)] = 0
            else:
                score = score.abs()
            score[~after.isfinite()] = 0
            top = score.topk(min(_PER_GROUP, values.numel()))
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            by_bit.append([(s, Flip(name, at, bit)) for s, at in pairs if s > 0])
        if in_range:
            best: dict[int, tuple[float, Flip]] = {}
            for s, flip in sorted((pair for group in by_bit for pair in group), reverse=True):
                best.setdefault(flip.at, (s, flip))
            by_bit = [list(best.values())]
        groups += [group for group in by_bit if group]
    return [[flip for _, flip in group] for group in sorted(groups, key=lambda group: -group[0][0])]


def _gradients(model: nn.Module, names: list[str], tokens: Tensor, scored: Tensor) -> dict[str, Tensor]:
    """Gradient of the mean loss of the scored tokens by these parameters, in float32."""
    wanted = {name: p for name, p in model.named_parameters() if name in names and p.is_floating_point()}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        for parameter in wanted.values():
            parameter.requires_grad_(True)
        device = next(model.parameters()).device
        with torch.enable_grad():
            logits = model(input_ids=tokens.to(device), use_cache=False).logits[:, :-1].float()
            counted = scored[:, 1:].to(device)
            loss = functional.cross_entropy(logits[counted], tokens[:, 1:].to(device)[counted])
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)
    return {name: g.float().nan_to_num() for name, g in zip(wanted, found, strict=True) if g is not None}
