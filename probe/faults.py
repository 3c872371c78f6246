"""Faults on purpose, for drills and tests: damaged values in memory, with the way back."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..monitors.wire import Fault, FaultKind, FaultOrder
from .stack import Stack


class UnknownTensor(Exception):
    """No live tensor answers to that name; the text says which there are."""


@dataclass(frozen=True)
class _Injected:
    fault: Fault
    values: Tensor  # flat view of the live parameter
    indices: Tensor
    before: Tensor


class Faults:
    """The faults of this process, newest last."""

    def __init__(self) -> None:
        """None yet."""
        self._injected: dict[str, _Injected] = {}

    def active(self) -> list[Fault]:
        """The faults that stand now."""
        return [injected.fault for injected in self._injected.values()]

    @torch.inference_mode()
    def add(self, id: str, order: FaultOrder, model: nn.Module, stack: Stack) -> Fault:
        """Damage `order.count` values of the tensor.

        Raises:
            UnknownTensor: the block has no such tensor, or holds it where no tensor shows it.
        """
        name, parameter, rows = _resolve(order, model, stack)
        values = parameter.data.view(-1)
        width = values.numel() // parameter.shape[0]
        low, high = (rows.start * width, rows.stop * width) if rows is not None else (0, values.numel())
        # A sample, not a permutation of the tensor: the scheduler stands still meanwhile.
        generator = random.Random(order.seed)  # noqa: S311 - reproducible, not secret
        chosen = generator.sample(range(low, high), min(order.count, high - low))
        indices = torch.tensor(chosen, device=values.device)
        before = values[indices].clone()
        values[indices] = _damaged(before, order.kind, values[low:high], generator)
        fault = Fault(
            id=id, block=order.block, tensor=name, kind=order.kind, count=int(indices.numel()), seed=order.seed
        )
        self._injected[id] = _Injected(fault, values, indices, before)
        return fault

    @torch.inference_mode()
    def remove(self, id: str) -> bool:
        """Put the values back; False when there is no such fault.

        Faults that overlap come out in reverse order, so later ones on the same tensor are lifted and laid again.
        """
        if id not in self._injected:
            return False
        order = list(self._injected)
        later = [self._injected[other] for other in order[order.index(id) + 1 :]]
        gone = self._injected.pop(id)
        damaged = [other.values[other.indices].clone() for other in later]
        for other in reversed(later):
            other.values[other.indices] = other.before
        gone.values[gone.indices] = gone.before
        for other, values in zip(later, damaged, strict=True):
            other.before.copy_(other.values[other.indices])
            other.values[other.indices] = values
        return True


def _damaged(before: Tensor, kind: FaultKind, tensor: Tensor, generator: random.Random) -> Tensor:
    match kind:
        case FaultKind.BURST:
            sign = torch.tensor([generator.choice((-1.0, 1.0)) for _ in range(before.numel())], device=before.device)
            return (sign * tensor.float().abs().max() * 64).to(before.dtype)
        case FaultKind.BIT:
            bits = before.element_size() * 8
            integers = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
            return (before.view(integers) ^ (1 << (bits - 2))).view(before.dtype)
        case FaultKind.NAN:
            return torch.full_like(before, torch.nan)
        case FaultKind.INF:
            return torch.full_like(before, torch.inf)
        case FaultKind.ZEROS:
            return torch.zeros_like(before)


def _resolve(order: FaultOrder, model: nn.Module, stack: Stack) -> tuple[str, Tensor, range | None]:
    """The live parameter by its own name or the checkpoint's, and its rows where it is packed with others."""
    prefix = f"{stack.path}.{order.block}."
    live = {
        name.removeprefix(prefix): parameter
        for name, parameter in model.named_parameters()
        if name.startswith(prefix) and parameter.numel() and parameter.is_floating_point()
    }
    wanted = order.tensor.removeprefix(prefix)
    candidates = [wanted, f"{wanted}.weight"]
    matches = [name for name in live if any(name == c or name.endswith(f".{c}") for c in candidates)]
    rows = None
    if not matches:
        head, _, part = wanted.removesuffix(".weight").rpartition(".")
        for packed, parts in getattr(model, "packed_modules_mapping", {}).items():
            if part in parts:
                name = f"{head}.{packed}.weight" if head else f"{packed}.weight"
                matches = [live_name for live_name in live if live_name == name or live_name.endswith(f".{name}")]
                if len(matches) == 1:
                    rows = _rows(model.get_submodule((prefix + matches[0]).removesuffix(".weight")), parts.index(part))
                break
    if len(matches) != 1:
        problem = "is not there" if not matches else f"is ambiguous ({', '.join(matches)})"
        raise UnknownTensor(
            f"Tensor {order.tensor!r} of block {order.block} {problem}; tensors in memory: {', '.join(sorted(live))}."
        )
    return prefix + matches[0], live[matches[0]], rows


def _rows(module: Any, part: int) -> range:
    """Rows of one part of a fused projection on this rank."""
    sizes = [size // module.tp_size for size in module.output_sizes]
    return range(sum(sizes[:part]), sum(sizes[: part + 1]))
