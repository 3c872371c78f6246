"""From a block that departs to the module that departs first.

The same input holds for both sides only up to the first module that departs: whatever comes behind it has another
input, and departs for that.  So only the first is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .comparison import Comparison, together
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
    """Find the first child of a block that departs, then the first module inside it that does; over all ranks."""
    modules = pairs[0].modules(block) if pairs else []
    search = _Search(pairs, block)
    sublayer = search.first([module for module in modules if "." not in module])
    if sublayer is None:
        return Narrowing(None, None, search.comparisons, tuple(search.skipped))
    module = search.first([module for module in modules if module.startswith(f"{sublayer}.")])
    return Narrowing(sublayer, module or sublayer, search.comparisons, tuple(search.skipped))


class _Search:
    """Looks for the module of a block that departs first."""

    def __init__(self, pairs: Sequence[Pair], block: int) -> None:
        self._pairs = pairs
        self._block = block
        self._seen: dict[str, Comparison] = {}
        self.skipped: list[str] = []
        """Modules in front of what was found that could not be compared."""

    @property
    def comparisons(self) -> int:
        """Activations that were compared."""
        return sum(comparison.divergence is not None for comparison in self._seen.values())

    def first(self, modules: Sequence[str]) -> str | None:
        """Of these, in the order in which they run; None where none departs.

        By bisection: behind the first one all depart, each having the one in front of it as its input.  Where that does
        not hold (parallel branches), or one cannot be compared, in turn.
        """
        return self._bisected(modules) or self._in_turn(modules)

    def _bisected(self, modules: Sequence[str]) -> str | None:
        if not modules:
            return None
        low, high = 0, len(modules) - 1
        while low < high:
            middle = (low + high) // 2
            departs = self._departs(modules[middle])
            if departs is None:
                return None
            low, high = (low, middle) if departs else (middle + 1, high)
        return modules[low] if self._departs(modules[low]) else None

    def _in_turn(self, modules: Sequence[str]) -> str | None:
        for module in modules:
            departs = self._departs(module)
            if departs:
                return module
            if departs is None:
                self.skipped.append(module)
        return None

    def _departs(self, module: str) -> bool | None:
        if module not in self._seen:
            self._seen[module] = together(pair.compare(self._block, module) for pair in self._pairs)
        return self._seen[module].departs
