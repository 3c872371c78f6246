"""Fresh values of live tensors from the checkpoint, and memory against it, through the model's own loading code.

The engine must stand still meanwhile.  Stand-ins on the CPU take the places of the modules' tensors, `load_weights`
fills them, and the live tensors come back: fused projections, slices of tensor parallelism and padding come out as they
did at load, and the live memory is never written.  It works where memory has the layout that `load_weights` writes;
`reload.reload_module` makes everything else anew.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..monitors.faults.bits import bits
from .checkpoint import CheckpointUnusable, StoredTensor, checkpoint_folder, tensors_by_block
from .stack import Stack
from .stand_ins import load_context, one_line, stand_ins

# Of the backends for experts that are not quantised, those that leave them as `load_weights` wrote them.
_PLAIN_EXPERTS = {"TRITON", "BATCHED_TRITON"}
_UNKNOWN = "It is no parameter and no buffer that a checkpoint holds."
_NOT_FILLED = "No tensor of the checkpoint fills it."
# Values that are compared at once.
_SLICE = 2**17


@dataclass(frozen=True)
class Comparison:
    """Memory against checkpoint for one block, or for all that lies outside the blocks."""

    block: int | None
    equal: list[str] = field(default_factory=list)
    different: dict[str, int] = field(default_factory=dict)
    """Tensor -> how many of its values differ in a bit."""
    unfilled: dict[str, int] = field(default_factory=dict)
    """Tensor, one of those above -> how many of its values no tensor of the checkpoint fills, such as padding."""
    not_comparable: dict[str, str] = field(default_factory=dict)
    """Tensor -> why, in one sentence."""


@dataclass(frozen=True)
class _Filled:
    values: Tensor
    unfilled: int


@torch.inference_mode()
def fresh_tensors(model: nn.Module, vllm_config: Any, stack: Stack, names: list[str]) -> dict[str, Tensor]:
    """What the checkpoint has for these parameters and buffers, in the layout that they have in memory.

    Values that the checkpoint does not fill, such as padding, are the live ones.  Names that cannot be had this way
    (packed or derived at load, not in the checkpoint) are left out, unless that leaves nothing.

    Returns:
        Name -> a tensor on the CPU with shape, strides and type of the live one.

    Raises:
        CheckpointUnusable: the checkpoint cannot be read or loaded, or has none of the names.
    """
    live = _live(model)
    tensors = tensors_by_block(checkpoint_folder(vllm_config), model, stack)
    fresh: dict[str, Tensor] = {}
    reasons = []
    for block, group in by_block(names, stack).items():
        known = {name: live[name] for name in group if name in live}
        reasons += [f"{name}: {_UNKNOWN}" for name in group if name not in live]
        filled, missing = _fresh(model, vllm_config, known, tensors.get(block, {}))
        fresh.update({name: found.values for name, found in filled.items()})
        reasons += [f"{name}: {reason}" for name, reason in missing.items()]
    if not fresh:
        raise CheckpointUnusable(reasons[0] if reasons else "No tensor was asked for.")
    return fresh


@torch.inference_mode()
def differing(model: nn.Module, vllm_config: Any, stack: Stack) -> Iterator[Comparison]:
    """Memory against checkpoint, bit for bit: the blocks in their order, then what lies outside them.

    A tensor with two names, such as a tied head, comes once.

    Raises:
        CheckpointUnusable: the checkpoint cannot be read, or its blocks cannot be told.
    """
    live = _once(_live(model))
    groups = by_block(live, stack)
    tensors = tensors_by_block(checkpoint_folder(vllm_config), model, stack)
    for block in [*sorted(stack.layers), None]:
        yield _compare(model, vllm_config, block, {n: live[n] for n in sorted(groups.get(block, []))}, tensors)


@torch.inference_mode()
def fresh_block(
    model: nn.Module,
    vllm_config: Any,
    stack: Stack,
    block: int,
    tensors: Mapping[int | None, dict[str, StoredTensor]],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What the checkpoint has for the tensors of one block, and for the others why it has none, in one sentence.

    Args:
        model: The live model.
        vllm_config: Its configuration.
        stack: Its blocks.
        block: Which one.
        tensors: The checkpoint, as `tensors_by_block` gives it.

    Returns:
        Name -> a tensor on the CPU with shape, strides and type of the live one; name -> reason.
    """
    live = _once(_live(model))
    mine = {name: live[name] for name in by_block(live, stack).get(block, [])}
    filled, missing = _fresh(model, vllm_config, mine, tensors.get(block, {}))
    return {name: found.values for name, found in filled.items()}, missing


def _live(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by all their names, and the buffers that a checkpoint may hold."""
    live: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                live[f"{path}.{key}" if path else key] = buffer
    return live


def _once(live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor by the first of its names."""
    first = {id(tensor): name for name, tensor in reversed(live.items())}
    return {name: live[name] for name in reversed(first.values())}


def by_block(names: Iterable[str], stack: Stack) -> dict[int | None, list[str]]:
    """Names by the block of this rank that they lie in; None for those outside."""
    groups: dict[int | None, list[str]] = {}
    for name in names:
        groups.setdefault(stack.block_of(name), []).append(name)
    return groups


def _why_not(model: nn.Module, vllm_config: Any, name: str, tensor: Tensor) -> str | None:
    """Why `load_weights` does not write what memory holds of this tensor, in one sentence; None where it does."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    if not tensor.numel():
        return "The engine holds it in a packed form that no tensor shows."
    if getattr(model, "_do_torchao_reload", False):
        return "The model is quantised by torchao at load."
    path, _, key = name.rpartition(".")
    module: Any = model.get_submodule(path)
    method = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        backend = method.unquantized_backend.value
        if backend not in _PLAIN_EXPERTS:
            return f"The {backend} backend rearranges the experts at load."
        if vllm_config.parallel_config.enable_eplb:
            return "The load balancer moves the experts about."
    elif method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return f"{type(method).__name__} may rearrange it at load."
    if key in SKIP_TENSORS:
        # Of these vLLM keeps no record; nothing is known to rearrange them.
        return None
    parameters, buffers = get_layerwise_info(module).restore_metadata
    created = parameters.get(key, buffers.get(key))
    if created is None:
        return "It was made after the checkpoint was loaded."
    layout = (created.shape, created.dtype, created.stride())
    return None if layout == (tensor.shape, tensor.dtype, tensor.stride()) else "It was rearranged at load."


def _compare(
    model: nn.Module,
    vllm_config: Any,
    block: int | None,
    live: dict[str, Tensor],
    tensors: dict[int | None, dict[str, StoredTensor]],
) -> Comparison:
    filled, missing = _fresh(model, vllm_config, live, tensors.get(block, {}))
    result = Comparison(block, not_comparable=missing)
    for name, found in filled.items():
        if count := found.values.numel() - _count(_same(found.values, live[name], flipped=False)):
            result.different[name] = count
        else:
            result.equal.append(name)
        if found.unfilled:
            result.unfilled[name] = found.unfilled
    return result


def _fresh(
    model: nn.Module, vllm_config: Any, live: dict[str, Tensor], tensors: dict[str, StoredTensor]
) -> tuple[dict[str, _Filled], dict[str, str]]:
    """What the checkpoint has for these tensors, and for the others why it has nothing."""
    reasons = {name: _why_not(model, vllm_config, name, tensor) for name, tensor in live.items()}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    wanted = {name: tensor for name, tensor in live.items() if name not in missing}
    try:
        filled = _fill(model, vllm_config, wanted, tensors)
    except CheckpointUnusable as reason:
        return {}, missing | dict.fromkeys(wanted, str(reason))
    return filled, missing | {name: _NOT_FILLED for name in wanted if name not in filled}


def _fill(
    model: nn.Module, vllm_config: Any, wanted: dict[str, Tensor], tensors: dict[str, StoredTensor]
) -> dict[str, _Filled]:
    """What `load_weights` makes of these tensors for the wanted names; names that it fills nowhere are left out.

    It starts from the live values with every bit flipped, so that a value which was not written shows.  Where only a
    part was written it runs once more from the live values: what was filled then is what differs from the first start.
    """
    first = {name: _start(tensor, flipped=True) for name, tensor in wanted.items()}
    _load(model, vllm_config, {id(wanted[name]): start for name, start in first.items()}, tensors)
    filled = {}
    partly = {}
    for name, tensor in wanted.items():
        start = first.pop(name)
        untouched = _count(_same(start, tensor, flipped=True))
        if not untouched:
            filled[name] = _Filled(start.as_subclass(Tensor), 0)
        elif untouched < tensor.numel():
            partly[name] = list(_same(start, tensor, flipped=True))
    if partly:
        second = {name: _start(wanted[name], flipped=False) for name in partly}
        _load(model, vllm_config, {id(wanted[name]): start for name, start in second.items()}, tensors)
        for name, untouched_slices in partly.items():
            pairs = zip(untouched_slices, _same(second[name], wanted[name], flipped=False), strict=True)
            unfilled = _count(untouched & same for untouched, same in pairs)
            filled[name] = _Filled(second[name].as_subclass(Tensor), unfilled)
    return filled


def _start(live: Tensor, *, flipped: bool) -> Tensor:
    """A tensor on the CPU with the live one's class, attributes, shape and strides, and its values or their complement.

    On the CPU: a busy device has no room for a second copy of a block.
    """
    start = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype)
    values = bits(start).copy_(bits(live.detach()))
    if flipped:
        values.bitwise_not_()
    start.__class__ = live.__class__
    start.__dict__ = dict(live.__dict__)
    return start


def _same(start: Tensor, live: Tensor, *, flipped: bool) -> Iterator[Tensor]:
    """Which values are the live ones, or their complement, bit for bit, slice by slice: what is computed stays small
    beside the tensor."""
    for mine, theirs in zip(_slices(start), _slices(live), strict=True):
        right = theirs.cpu()
        yield mine == (~right if flipped else right)


def _slices(tensor: Tensor) -> tuple[Tensor, ...]:
    """The bits of a tensor in runs of rows."""
    whole = bits(tensor.detach())
    if whole.dim() == 0:
        whole = whole[None]
    slices: tuple[Tensor, ...] = torch.split(whole, max(1, _SLICE * len(whole) // whole.numel()))
    return slices


def _count(masks: Iterable[Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks)


def _load(model: Any, vllm_config: Any, instead: dict[int, Tensor], tensors: dict[str, StoredTensor]) -> None:
    if not instead:
        return
    with load_context(vllm_config), stand_ins(model, instead):
        try:
            for group in _groups(tensors):
                model.load_weights((name, stored.read()) for name, stored in group)
        except CheckpointUnusable:
            raise
        except Exception as error:
            raise CheckpointUnusable(
                f"{type(model).__name__} cannot load the checkpoint's tensors again: {one_line(error)}"
            ) from error


def _groups(tensors: dict[str, StoredTensor]) -> Iterator[list[tuple[str, StoredTensor]]]:
    """Tensors that are loaded in one call, no more bytes than the largest has, but no more than some dozens of calls.

    A loader's loop holds the last tensor while it asks for the next: in one call for all, twice the largest.
    """
    sizes = [stored.stop - stored.start for stored in tensors.values()]
    most = max([sum(sizes) // 16, *sizes], default=0)
    group: list[tuple[str, StoredTensor]] = []
    held = 0
    for (name, stored), size in zip(tensors.items(), sizes, strict=True):
        if group and held + size > most:
            yield group
            group, held = [], 0
        group.append((name, stored))
        held += size
    if group:
        yield group
