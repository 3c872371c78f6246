"""From a block that departs to the module that departs first.

The same input holds for both sides only up to the first module that departs: whatever comes behind it has another
input, and departs for that.  So only the first is named.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .comparison import together
from .pair import Pair


@dataclass(frozen=True)
class Narrowing:
    """Where a block begins to depart."""

    sublayer: str | None
    """The first child that departs; None: none does."""
    module: str | None
    """The first module inside it that departs, or the child itself where none does."""
    comparisons: int
    """Activations that were compared."""
    skipped: tuple[str, ...]
    """Modules in front of it that could not be compared: it may have begun there."""


def narrow(pairs: Sequence[Pair], block: int) -> Narrowing:
    """Compare the children of a block in turn, then the modules inside the first one that departs; over all ranks."""
    modules = pairs[0].modules(block) if pairs else []
    sublayer, made, skipped = _first(pairs, block, [module for module in modules if "." not in module])
    if sublayer is None:
        return Narrowing(None, None, made, tuple(skipped))
    inside = [module for module in modules if module.startswith(f"{sublayer}.")]
    module, more, hidden = _first(pairs, block, inside)
    return Narrowing(sublayer, module or sublayer, made + more, (*skipped, *hidden))


def _first(pairs: Sequence[Pair], block: int, modules: Iterable[str]) -> tuple[str | None, int, list[str]]:
    """The first that departs, how many were compared, and those that could not be."""
    made = 0
    skipped: list[str] = []
    for module in modules:
        comparison = together(pair.compare(block, module) for pair in pairs)
        made += comparison.divergence is not None
        if comparison.departs:
            return module, made, skipped
        if comparison.departs is None:
            skipped.append(module)
    return None, made, skipped
