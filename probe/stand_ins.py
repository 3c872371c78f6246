"""Stand-ins for a model's tensors while its own loading code runs, so that the live memory is not written."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def registered(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of one module, without those of its children."""
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


@contextmanager
def load_context(vllm_config: Any) -> Iterator[None]:
    """What vLLM sets while it loads a model."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(vllm_config), set_default_torch_dtype(vllm_config.model_config.dtype):
        yield


@contextmanager
def stand_ins(model: nn.Module, instead: dict[int, Tensor], keep: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Modules have these tensors instead of the live ones of that id, and for all others ones that swallow what is
    loaded; in the modules of `keep` the live ones stay.  Afterwards every module has its own tensors as before."""
    kept = set(keep)
    saved = [(m, dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set)) for m in model.modules()]
    attributes = [(tensor, dict(tensor.__dict__)) for module in kept for tensor in registered(module)]
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


def one_line(error: Exception) -> str:
    """What an error says, without its line breaks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
