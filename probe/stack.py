"""The decoder stack of a model that vLLM has just loaded: which module is which block."""

import inspect
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

_HIDDEN_NAMES = ("hidden_states", "x")


class UnsupportedModel(Exception):
    """This model cannot be gated or scanned; the text is one sentence for the operator."""


@dataclass(frozen=True)
class Signature:
    """Where a layer's `forward` takes the residual stream."""

    hidden: str
    hidden_index: int
    residual_index: int | None

    @classmethod
    def of(cls, layer: nn.Module) -> "Signature":
        """Read it from the class, before anything wraps it.

        Raises:
            UnsupportedModel: no argument is known to carry the hidden state.
        """
        forward = inspect.unwrap(type(layer).forward)
        names = [name for name in inspect.signature(forward).parameters if name != "self"]
        hidden = next((name for name in _HIDDEN_NAMES if name in names), None)
        if hidden is None:
            raise UnsupportedModel(
                f"Layer class {type(layer).__name__} has no argument named hidden_states, so its input cannot be gated."
            )
        residual = names.index("residual") if "residual" in names else None
        return cls(hidden, names.index(hidden), residual)

    def get_hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hidden state among a call's arguments."""
        return kwargs[self.hidden] if self.hidden in kwargs else args[self.hidden_index]

    def get_residual(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The residual among a call's arguments, or None where there is none."""
        if "residual" in kwargs:
            return kwargs["residual"]
        if self.residual_index is not None and self.residual_index < len(args):
            return args[self.residual_index]
        return None

    def replace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any, residual: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with another stream."""
        new_args, new_kwargs = list(args), dict(kwargs)
        if self.hidden in kwargs:
            new_kwargs[self.hidden] = hidden
        else:
            new_args[self.hidden_index] = hidden
        if self.residual_index is not None:
            if "residual" in kwargs or self.residual_index >= len(args):
                new_kwargs["residual"] = residual
            else:
                new_args[self.residual_index] = residual
        return tuple(new_args), new_kwargs


@dataclass(frozen=True)
class Stack:
    """The blocks that this rank holds, by their index in the whole model."""

    layers: dict[int, nn.Module]
    num_blocks: int
    path: str

    @property
    def layer_class(self) -> str:
        """Class names of the layers, joined where a model mixes several."""
        return " | ".join(sorted({type(layer).__name__ for layer in self.layers.values()}))

    def block_of(self, name: str) -> int | None:
        """The block in which a parameter, buffer or module of this full name lies; None outside the blocks."""
        if not self.path or not name.startswith(f"{self.path}."):
            return None
        number, dot, _ = name.removeprefix(f"{self.path}.").partition(".")
        return int(number) if dot and number.isdecimal() else None


def find_stack(model: nn.Module) -> Stack:
    """The longest list of layers that take a hidden state; of a multimodal model, of its language model.

    Raises:
        UnsupportedModel: no such list.
    """
    from vllm.model_executor.models.interfaces import supports_multimodal
    from vllm.model_executor.models.utils import PPMissingLayer

    prefix, root = "", model
    if supports_multimodal(model):
        root = cast(Any, model).get_language_model()
        prefix = next((name for name, module in model.named_modules() if module is root), "")
    best: tuple[str, nn.ModuleList] | None = None
    for name, module in root.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        real = [layer for layer in module if not isinstance(layer, PPMissingLayer)]
        if not real or (best is not None and len(module) <= len(best[1])):
            continue
        parameters = inspect.signature(inspect.unwrap(type(real[0]).forward)).parameters
        if any(hidden in parameters for hidden in _HIDDEN_NAMES):
            best = (name, module)
    if best is None:
        raise UnsupportedModel(f"Model class {type(model).__name__} has no list of layers that take hidden_states.")
    name, modules = best
    layers = {index: layer for index, layer in enumerate(modules) if not isinstance(layer, PPMissingLayer)}
    return Stack(layers, len(modules), f"{prefix}.{name}" if prefix else name)
