"""Which bytes of a model the kernels read, and which of them no tensor shows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..monitors.fingerprint.facts import NotCovered
from ..monitors.fingerprint.line import Source
from .gates import GATE
from .stack import Stack

STATE = frozenset({GATE, "kv_cache"})
"""Attributes that hold state, not weights: they change while the model serves."""

_SCRATCH = frozenset(
    {
        "per_layer_embeddings",
        "per_layer_inputs",
        "positions",
        "hidden_states",
        "topk_indices_buffer",
        "token_context",
        "_inputs_embeds_buf",
        "_causal_buf",
    }
)
"""Plain attributes in which a forward pass hands values on: Gemma 3n and 4, DeepSeek's sparse attention, LongCat n-gram
and Diffusion Gemma of vLLM 0.32."""

_ON_HOST = frozenset({"_k_scale_cpu", "_v_scale_cpu"})
"""Plain attributes of attention layers: copies on the host, made anew at each reload, of scales that are covered."""


class _Found(NamedTuple):
    name: str
    tensor: Tensor
    place: tuple[int, int]
    now: Callable[[], Any]
    """What the model has at this place now."""


@dataclass(frozen=True)
class Weights:
    """What a model holds: tensors that can be fingerprinted, all on one device, and those that cannot."""

    device: torch.device
    sources: list[Source] = field(default_factory=list)
    not_covered: list[NotCovered] = field(default_factory=list)
    _found: list[_Found] = field(default_factory=list)

    def replaced(self) -> list[str]:
        """Tensors that are no longer where they were: their place holds another tensor, or none."""
        return [found.name for found in self._found if not _is_at(found.place, found.now())]


def weights_of(model: nn.Module, stack: Stack, device: torch.device) -> Weights:
    """All parameters and buffers, and tensors that modules keep as plain attributes, such as MLA's derived matrices.

    Args:
        model: As loaded and processed, before the engine allocates its KV cache.
        stack: Its blocks; one without a path where there are none.
        device: Where the weights lie.
    """
    weights = Weights(device)
    for found in _tensors(model):
        tensor = found.tensor
        if (reason := _unreadable(tensor, device)) is not None:
            weights.not_covered.append(
                NotCovered(tensor=found.name, bytes=_size(model, found.name, tensor), reason=reason)
            )
            continue
        weights.sources.append(Source(found.name, stack.block_of(found.name), tensor))
        weights._found.append(found)
    return weights


def _tensors(model: nn.Module) -> Iterator[_Found]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, value in [*module._parameters.items(), *module._buffers.items(), *_attributes(module)]:
            if not isinstance(value, Tensor) or key in STATE or id(value) in seen:
                continue
            seen.add(id(value))
            name = f"{path}.{key}" if path else key

            def now(module: nn.Module = module, key: str = key) -> Any:
                return getattr(module, key, None)

            yield _Found(name, value, _place(value), now)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Plain attributes.  An empty one is a place that is filled later or never, and holds no weight."""
    for key, value in vars(module).items():
        if isinstance(value, Tensor) and value.numel() and key not in _SCRATCH | _ON_HOST:
            yield key, value


def _unreadable(tensor: Tensor, device: torch.device) -> str | None:
    if not tensor.numel():
        return "The tensor is empty: the engine holds the values in a form that no tensor shows."
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return f"The tensor has no plain memory (layout {tensor.layout}, device {tensor.device})."
    if tensor.device != device:
        return f"The tensor lies on {tensor.device}, not on {device}."
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        return f"Its memory cannot be read: {error}"
    return None


def _size(model: nn.Module, name: str, tensor: Tensor) -> int | None:
    """Bytes that a tensor should have; of an empty weight, what its Linear module says of itself."""
    if tensor.numel():
        return tensor.numel() * tensor.element_size()
    module: Any = model.get_submodule(name.rpartition(".")[0])
    rows, columns = (getattr(module, f"{side}_size_per_partition", None) for side in ("output", "input"))
    if name.endswith(".weight") and isinstance(rows, int) and isinstance(columns, int):
        return rows * columns * tensor.element_size()
    return None


def _is_at(place: tuple[int, int], now: Any) -> bool:
    return isinstance(now, Tensor) and _place(now) == place


def _place(tensor: Tensor) -> tuple[int, int]:
    """Address and length: a parameter may get other memory and stay the same object."""
    try:
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        # A tensor without plain memory is not covered anyway.
        return 0, 0
