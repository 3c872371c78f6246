"""The ranks of one engine, working in step: none goes on where another has failed.

A rank that raised while the others wait for it in a collective operation would leave them waiting for ever.  So what
the ranks do together is cut by agreements, a small all-reduce between their CPUs: has anybody failed since the last
one?  A rank that failed says so in the agreement that the others come to next, and all of them stop there.  Nothing is
waited for between two agreements but what the agreement has just promised.

What tensor-parallel ranks do inside a layer is vLLM's own and is not guarded: one that fails there stalls the others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class PeerFailed(Exception):
    """Another rank failed, and this one stopped with it."""

    def __init__(self) -> None:
        super().__init__("It stopped because another rank failed.")


@dataclass(frozen=True)
class Ranks:
    """All ranks of one engine, seen from one of them."""

    stage: int
    """Which part of the pipeline this rank computes."""
    stages: int
    _groups: Sequence[Any]
    """torch's process groups over the CPU: what goes through one after the other has been to all ranks."""
    _pipeline: Any
    """Has `broadcast(tensor, source stage)` between the ranks that differ in their stage alone."""

    @classmethod
    def here(cls) -> "Ranks":
        """Seen from this process, one of vLLM's workers."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        # Not vLLM's world group: it may reach into other engines of a data-parallel server, which do something else.
        tensor, pipeline = get_tp_group(), get_pp_group()
        groups = [group.cpu_group for group in (tensor, pipeline) if group.world_size > 1]
        return cls(pipeline.rank_in_group, pipeline.world_size, groups, pipeline)

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks do what is inside, or none of them comes out of it without an exception.

        Raises:
            PeerFailed: another rank raised.
        """
        try:
            yield
        except PeerFailed:
            raise
        except Exception:
            self._anybody(failed=True)
            raise
        self.agree()

    def agree(self) -> None:
        """Go on only where all ranks have come so far.

        Raises:
            PeerFailed: one has not.
        """
        if self._anybody(failed=False):
            raise PeerFailed

    def _anybody(self, *, failed: bool) -> bool:
        if not self._groups:
            return failed
        vote = torch.tensor([int(failed)])
        for group in self._groups:
            torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MAX, group=group)
        return bool(vote.item())

    def share(self, stage: int, like: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` gives on one stage of the pipeline, on all of them.

        Args:
            stage: The one that computes; the others only receive.
            like: Shape, type and device of the result; its values do not matter.
            compute: Called on that stage alone.

        Raises:
            PeerFailed: it failed there, or another rank did not come so far.
        """
        if stage == self.stage:
            tensor = compute().contiguous()
            if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                raise ValueError(
                    f"A stage of the pipeline made {tuple(tensor.shape)} {tensor.dtype}, "
                    f"and the others wait for {tuple(like.shape)} {like.dtype}."
                )
        else:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self.agree()
        self._pipeline.broadcast(tensor, stage)
        return tensor

    def gathered(self, mine: T) -> list[T]:
        """What each rank has to say, in the order of the ranks; plain data.

        Raises:
            PeerFailed: another rank did not come so far.
        """
        self.agree()
        said = [mine]
        for group in self._groups:
            lists: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(lists, said, group=group)
            said = [one for each in lists for one in each]
        return said
