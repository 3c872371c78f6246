"""What the modules of a block hand on while it runs."""

from collections.abc import Iterator
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


def _by_token(output: Tensor, tokens: int) -> Tensor | None:
    """(tokens, ...) or (M, T, ...) with M * T tokens -> (tokens, W)."""
    if not output.is_floating_point() or output.dim() < 2:
        return None
    if output.shape[0] == tokens or output.shape[0] * output.shape[1] == tokens:
        return output.reshape(tokens, -1)
    return None
