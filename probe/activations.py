"""What the modules of a block hand on while it runs, with their own tensors or with others."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def handed_on(block: nn.Module, tokens: int) -> Iterator[dict[str, Tensor]]:
    """Within it, what the modules inside `block` hand on is kept, by path, in the order in which they do: copies.

    Kept is the first tensor of an output, as (tokens, W), where it has a row per token; of a module that is called more
    than once, the first call.
    """
    kept: dict[str, Tensor] = {}

    def keep(path: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if path not in kept and isinstance(first, Tensor) and (rows := _by_token(first, tokens)) is not None:
            # Later modules may write into it.
            kept[path] = rows.clone()

    def hook(path: str) -> Any:
        return lambda module, args, output: keep(path, output)

    handles = [module.register_forward_hook(hook(path)) for path, module in block.named_modules() if path]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def holding(block: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it, the modules of `block` hold these tensors, by the names of their own; afterwards their own again.

    A tensor with several names is exchanged under all of them.  (torch's `functional_call` puts the wrong one back
    where a module has two names, as in MLA.)
    """
    named = [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]
    instead = {id(own): tensors[name] for name, own in named if name in tensors}
    places = [
        (registry, key, own)
        for module in block.modules()
        for registry in (module._parameters, module._buffers)
        for key, own in registry.items()
        if id(own) in instead
    ]
    try:
        for registry, key, own in places:
            registry[key] = instead[id(own)]  # type: ignore[assignment]
        yield
    finally:
        for registry, key, own in places:
            registry[key] = own  # type: ignore[assignment]


def _by_token(output: Tensor, tokens: int) -> Tensor | None:
    """(tokens, ...) or (M, T, ...) with M * T tokens -> (tokens, W)."""
    if not output.is_floating_point() or output.dim() < 2:
        return None
    if output.shape[0] == tokens or output.shape[0] * output.shape[1] == tokens:
        return output.reshape(tokens, -1)
    return None
