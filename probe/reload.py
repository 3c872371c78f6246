"""Fresh values of live tensors from the checkpoint, through the model's own loading code.

The engine must stand still meanwhile.  Two ways:

`fresh_tensors` and `differing` put stand-ins on the CPU where the modules have their tensors, let `load_weights` fill
them and put the live tensors back: fused projections, slices of tensor parallelism and padding come out as they did at
load, and the live memory is never written.  It works where memory has the layout that `load_weights` writes.

`reload_module` makes everything else anew, in place, by vLLM's layerwise reload (vLLM 0.32,
model_executor/model_loader/reload/layerwise.py), which also processes the weights as after a load.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..monitors.faults.bits import bits
from .checkpoint import CheckpointUnusable, StoredTensor, checkpoint_folder, tensors_by_block
from .stack import Stack, find_stack

# Of the backends for experts that are not quantised, those that leave them as `load_weights` wrote them.
_PLAIN_EXPERTS = {"TRITON", "BATCHED_TRITON"}


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
    for block, group in _grouped(names, stack).items():
        wanted = {}
        for name in group:
            reason = _why_not(model, vllm_config, name, live.get(name))
            if reason is None:
                wanted[name] = live[name]
            else:
                reasons.append(f"{name}: {reason}")
        try:
            filled = _fill(model, vllm_config, wanted, tensors.get(block, {}))
        except CheckpointUnusable as reason:
            reasons.append(str(reason))
            continue
        fresh.update({name: found.values for name, found in filled.items()})
        reasons += [f"{name}: {_NOT_FILLED}" for name in wanted if name not in filled]
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
    live = _live(model)
    once = {id(tensor): name for name, tensor in reversed(live.items())}
    groups = _grouped(once.values(), stack)
    tensors = tensors_by_block(checkpoint_folder(vllm_config), model, stack)
    for block in [*sorted(stack.layers), None]:
        yield _compare(model, vllm_config, block, {n: live[n] for n in sorted(groups.get(block, []))}, tensors)


def reload_module(model: Any, vllm_config: Any, module_name: str) -> None:
    """Load one module anew in place and process it as after a load; CUDA graphs keep what they refer to.

    Other modules stay as they are, but for an attention layer that derives matrices from this one (MLA): it derives
    them again.  Whether the new bytes are the right ones is for the caller to check; when this fails half-way, tensors
    of the module may have been written.

    Raises:
        CheckpointUnusable: vLLM cannot reload this module, or the checkpoint does not fill it; one sentence.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if not module_name or module_name not in dict(model.named_modules()):
        raise CheckpointUnusable(f"{type(model).__name__} has no module {module_name!r} that can be loaded anew.")
    module = model.get_submodule(module_name)
    inside = set(module.modules())
    own = {id(tensor) for layer in inside for tensor in _registered(layer)}
    if any(id(tensor) in own for layer in model.modules() if layer not in inside for tensor in _registered(layer)):
        raise CheckpointUnusable(f"{module_name} shares a tensor with another module, which vLLM cannot load anew.")
    stack = find_stack(model)
    (block,) = _grouped([f"{module_name}."], stack)
    tensors = tensors_by_block(checkpoint_folder(vllm_config), model, stack).get(block, {})
    model_config = vllm_config.model_config
    try:
        with _load_context(vllm_config), _stand_ins(model, {}, keep=inside):
            try:
                with torch.device(vllm_config.device_config.device):
                    initialize_layerwise_reload(module)
                    model.load_weights((name, stored.read()) for name, stored in tensors.items())
                    _check_complete(module, module_name)
                    finalize_layerwise_reload(module, model_config)
            finally:
                for layer in inside:
                    get_layerwise_info(layer).reset()
        with _load_context(vllm_config), torch.no_grad():
            for layer in model.modules():
                derives = is_deferred_attention_layer(layer) and getattr(layer, "kv_b_proj", None) in inside
                if derives and layer not in inside:
                    layer.process_weights_after_loading(model_config.dtype)
    except CheckpointUnusable:
        raise
    except Exception as error:
        raise CheckpointUnusable(f"vLLM cannot load {module_name} anew: {_one_line(error)}") from error


def _check_complete(module: nn.Module, module_name: str) -> None:
    """Every parameter of the module got its values; vLLM itself would take a part of them for padding."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    names = []
    for name, layer in module.named_modules():
        info = get_layerwise_info(layer)
        # Of a layer that is done, vLLM has forgotten the count.
        waits = info.can_load() and not is_deferred_attention_layer(layer)
        if waits and any(parameter is not None for parameter in layer._parameters.values()):
            names.append(f"{name or module_name} ({info.load_numel} of {info.load_numel_total} values)")
    if names:
        raise CheckpointUnusable(f"The checkpoint does not fill {', '.join(names)} of {module_name}.")


# --- which tensors ------------------------------------------------------------------------------------------------

_NOT_FILLED = "No tensor of the checkpoint fills it."


def _live(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by all their names, and the buffers that a checkpoint may hold."""
    live: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                live[f"{path}.{key}" if path else key] = buffer
    return live


def _registered(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _grouped(names: Iterable[str], stack: Stack) -> dict[int | None, list[str]]:
    """Names by the block of this rank that they lie in; None for those outside."""
    inside = re.compile(re.escape(stack.path) + r"\.(\d+)\.")
    groups: dict[int | None, list[str]] = {}
    for name in names:
        match = inside.match(name) if stack.path else None
        groups.setdefault(int(match[1]) if match else None, []).append(name)
    return groups


def _why_not(model: nn.Module, vllm_config: Any, name: str, tensor: Tensor | None) -> str | None:
    """Why `load_weights` does not write what memory holds of this tensor, in one sentence; None where it does."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    if tensor is None:
        return "It is no parameter and no buffer that a checkpoint holds."
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


# --- loading ------------------------------------------------------------------------------------------------------


def _compare(
    model: nn.Module,
    vllm_config: Any,
    block: int | None,
    live: dict[str, Tensor],
    tensors: dict[int | None, dict[str, StoredTensor]],
) -> Comparison:
    result = Comparison(block)
    reasons = {name: _why_not(model, vllm_config, name, tensor) for name, tensor in live.items()}
    result.not_comparable.update({name: reason for name, reason in reasons.items() if reason is not None})
    wanted = {name: tensor for name, tensor in live.items() if reasons[name] is None}
    try:
        filled = _fill(model, vllm_config, wanted, tensors.get(block, {}))
    except CheckpointUnusable as reason:
        result.not_comparable.update(dict.fromkeys(wanted, str(reason)))
        return result
    for name, tensor in wanted.items():
        found = filled.get(name)
        if found is None:
            result.not_comparable[name] = _NOT_FILLED
            continue
        if count := int((bits(found.values) != bits(tensor.detach().cpu())).sum()):
            result.different[name] = count
        else:
            result.equal.append(name)
        if found.unfilled:
            result.unfilled[name] = found.unfilled
    return result


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
        untouched = bits(first[name]) == ~bits(tensor.detach().cpu())
        if not untouched.any():
            filled[name] = _Filled(first[name].as_subclass(Tensor), 0)
        elif not untouched.all():
            partly[name] = untouched
    if partly:
        second = {name: _start(wanted[name], flipped=False) for name in partly}
        _load(model, vllm_config, {id(wanted[name]): start for name, start in second.items()}, tensors)
        for name, untouched in partly.items():
            unfilled = untouched & (bits(second[name]) == bits(wanted[name].detach().cpu()))
            filled[name] = _Filled(second[name].as_subclass(Tensor), int(unfilled.sum()))
    return filled


def _start(live: Tensor, *, flipped: bool) -> Tensor:
    """A tensor on the CPU with the live one's class, attributes, shape and strides, and its values or their complement.

    On the CPU: a busy device has no room for a second copy of a block.
    """
    start = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype)
    values = bits(live.detach().cpu())
    bits(start).copy_(~values if flipped else values)
    start.__class__ = live.__class__
    start.__dict__ = dict(live.__dict__)
    return start


def _load(model: Any, vllm_config: Any, instead: dict[int, Tensor], tensors: dict[str, StoredTensor]) -> None:
    if not instead:
        return
    with _load_context(vllm_config), _stand_ins(model, instead):
        try:
            model.load_weights((name, stored.read()) for name, stored in tensors.items())
        except CheckpointUnusable:
            raise
        except Exception as error:
            raise CheckpointUnusable(
                f"{type(model).__name__} cannot load the checkpoint's tensors again: {_one_line(error)}"
            ) from error


@contextmanager
def _load_context(vllm_config: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(vllm_config), set_default_torch_dtype(vllm_config.model_config.dtype):
        yield


@contextmanager
def _stand_ins(model: nn.Module, instead: dict[int, Tensor], keep: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Modules have these tensors instead of the live ones of that id, and for all others ones that swallow what is
    loaded; in the modules of `keep` the live ones stay.  Afterwards every module has its own tensors as before."""
    kept = set(keep)
    saved = [(m, dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set)) for m in model.modules()]
    attributes = [(tensor, dict(tensor.__dict__)) for module in kept for tensor in _registered(module)]
    made = dict(instead)
    try:
        for module, *_ in saved:
            if module in kept:
                continue
            for registry in (module._parameters, module._buffers):
                for key, tensor in registry.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = _swallower(tensor)
                        registry[key] = made[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for module, parameters, buffers, passing in saved:
            for registry, before in ((module._parameters, parameters), (module._buffers, buffers)):
                registry.clear()
                registry.update(before)  # type: ignore[arg-type]
            module._non_persistent_buffers_set = passing
        for tensor, before in attributes:
            tensor.__dict__.clear()
            tensor.__dict__.update(before)


def _swallower(live: Tensor) -> Tensor:
    """Takes whatever is loaded and keeps nothing: no memory, and a loader that does not load."""
    tensor = nn.Parameter(torch.empty(live.shape, dtype=live.dtype, device="meta"), requires_grad=False)
    tensor.__dict__.update({key: value for key, value in live.__dict__.items() if key != "_weight_loader"})
    tensor.__dict__["weight_loader"] = _swallow
    return tensor


def _swallow(*arguments: Any, **options: Any) -> bool:
    # Loaders of experts are asked whether they took the tensor.
    return True


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
