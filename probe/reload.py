"""A module made anew from the checkpoint, in place, for layouts that are made at load.

By vLLM's layerwise reload (vLLM 0.32, model_executor/model_loader/reload/layerwise.py), which processes the weights
as after a load, too.  The engine must stand still meanwhile.
"""

from typing import Any

import torch
from torch import nn

from .checkpoint import CheckpointUnusable, checkpoint_folder, tensors_by_block
from .fresh import by_block
from .stack import find_stack
from .stand_ins import load_context, one_line, registered, stand_ins


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
    own = {id(tensor) for layer in inside for tensor in registered(layer)}
    if any(id(tensor) in own for layer in model.modules() if layer not in inside for tensor in registered(layer)):
        raise CheckpointUnusable(f"{module_name} shares a tensor with another module, which vLLM cannot load anew.")
    stack = find_stack(model)
    (block,) = by_block([f"{module_name}."], stack)
    tensors = tensors_by_block(checkpoint_folder(vllm_config), model, stack).get(block, {})
    model_config = vllm_config.model_config
    try:
        with load_context(vllm_config), stand_ins(model, {}, keep=inside):
            try:
                with torch.device(vllm_config.device_config.device):
                    initialize_layerwise_reload(module)
                    model.load_weights((name, stored.read()) for name, stored in tensors.items())
                    _check_complete(module, module_name)
                    finalize_layerwise_reload(module, model_config)
            finally:
                for layer in inside:
                    get_layerwise_info(layer).reset()
        with load_context(vllm_config), torch.no_grad():
            for layer in model.modules():
                derives = is_deferred_attention_layer(layer) and getattr(layer, "kv_b_proj", None) in inside
                if derives and layer not in inside:
                    layer.process_weights_after_loading(model_config.dtype)
    except CheckpointUnusable:
        raise
    except Exception as error:
        raise CheckpointUnusable(f"vLLM cannot load {module_name} anew: {one_line(error)}") from error


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
