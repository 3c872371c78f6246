"""The KV caches of the served model's attention layers."""

from typing import Any

import torch
from torch import Tensor

from .live_tensor import LiveTensor, UnknownTensor
from .stack import Stack

KV_CACHE = "kv_cache"
"""The word in an order that means the cache of a block instead of one of its weights."""


def kv_caches(vllm_config: Any) -> list[tuple[str, Tensor]]:
    """Full name and tensor of each cache on this rank; a layer with several has its name as often."""
    found = []
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        cache = getattr(layer, "kv_cache", None)
        for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
            if isinstance(tensor, Tensor) and tensor.numel():
                found.append((f"{name}.{KV_CACHE}", tensor))
    return found


def clear(vllm_config: Any) -> int:
    """Zero every KV block; how many tensors that were."""
    caches = kv_caches(vllm_config)
    with torch.inference_mode():
        for _, tensor in caches:
            tensor.zero_()
    return len(caches)


def cache_of(block: int | None, vllm_config: Any, stack: Stack) -> LiveTensor:
    """The cache of a block's attention; raises `UnknownTensor` where it has none, or more than one."""
    if block is None:
        raise UnknownTensor("Each block has a KV cache of its own: name the block.")
    mine = [(name, tensor) for name, tensor in kv_caches(vllm_config) if name.startswith(f"{stack.path}.{block}.")]
    if len(mine) != 1:
        raise UnknownTensor(f"Block {block} has {len(mine)} KV caches on this rank; only a single one can be damaged.")
    return LiveTensor(mine[0][0], block, mine[0][1], [])
