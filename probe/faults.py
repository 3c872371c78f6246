"""Faults in the served model: damaged values in memory, for drills and tests, with the way back."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..monitors.faults import damage
from ..monitors.faults.bits import read, write
from ..monitors.wire import Fault, FaultOrder
from .kv_cache import KV_CACHE
from .live_tensor import LiveTensor, UnknownTensor, find_tensor
from .stack import Stack


@dataclass(frozen=True)
class _Injected:
    fault: Fault
    tensor: Tensor
    where: Tensor | range
    before: Tensor

    def read(self) -> Tensor:
        """The bits that lie there now."""
        return read(self.tensor, self.where)

    def stands(self) -> bool:
        """Is any bit there still another than before the fault?"""
        return not torch.equal(self.read(), self.before)

    def write(self, values: Tensor) -> None:
        """Put these bits there."""
        write(self.tensor, self.where, values)


class Faults:
    """The faults of this process, newest last."""

    def __init__(self) -> None:
        """None yet."""
        self._injected: dict[str, _Injected] = {}
        self._cleared: set[str] = set()
        """Faults in KV caches that the last clearing took with it."""

    def active(self) -> list[Fault]:
        """The faults that stand now."""
        return [injected.fault for injected in self._injected.values()]

    @torch.inference_mode()
    def forget_repaired(self) -> None:
        """After a repair: those whose values were put back stand no more, and there is nothing left to undo."""
        self._injected = {id: injected for id, injected in self._injected.items() if injected.stands()}

    def forget_cached(self) -> None:
        """The KV caches were zeroed: no fault in them stands any more."""
        self._cleared = {id for id, injected in self._injected.items() if _cached(injected)}
        self._injected = {id: injected for id, injected in self._injected.items() if id not in self._cleared}

    @torch.inference_mode()
    def add(self, id: str, order: FaultOrder, target: LiveTensor, source: LiveTensor | None) -> Fault:
        """Damage the tensor.

        Raises:
            ValueError: the fault makes no sense for this tensor.
        """
        made = damage(order, target.values, source.values if source else None)
        found = {
            "id": id,
            "block": target.block,
            "tensor": target.name,
            "source": source.name if source else None,
            "count": made.after.numel(),
            "shared_with": target.shared_with,
        }
        injected = _Injected(
            Fault.model_validate(order.model_dump() | found),
            target.values,
            made.where,
            read(target.values, made.where),
        )
        injected.write(made.after)
        self._injected[id] = injected
        return injected.fault

    @torch.inference_mode()
    def remove(self, id: str) -> bool:
        """Put the values back; False when there is no such fault.

        Faults that overlap come out in reverse order, so later ones on the same tensor are lifted and laid again.  A
        fault in a KV cache has gone with the clearing that comes before any removal: what lay there belongs to
        requests that have ended since, and must not come back.
        """
        if id in self._cleared:
            return True
        if id not in self._injected:
            return False
        order = list(self._injected)
        later = [self._injected[other] for other in order[order.index(id) + 1 :]]
        gone = self._injected.pop(id)
        damaged = [other.read() for other in later]
        for other in reversed(later):
            other.write(other.before)
        gone.write(gone.before)
        for other, values in zip(later, damaged, strict=True):
            other.before.copy_(other.read())
            other.write(values)
        return True


def _cached(injected: _Injected) -> bool:
    return injected.fault.tensor.endswith(f".{KV_CACHE}")


def find_target(order: FaultOrder, model: nn.Module, stack: Stack) -> tuple[LiveTensor, LiveTensor | None]:
    """The tensor to damage, and the one that a stale page comes from.

    Raises:
        UnknownTensor: one of them is not there.
    """
    target = find_tensor(order.tensor, order.block, model, stack)
    if order.source is None:
        return target, None
    try:
        return target, find_tensor(order.source, target.block, model, stack)
    except UnknownTensor:
        if target.block is None:
            raise
        return target, find_tensor(order.source, None, model, stack)
