"""The replicas of a data-parallel server: each is judged by itself, and the one that is worst off speaks for all."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..monitors.finding import Finding, Health

F = TypeVar("F", bound=Finding)

# A finding outweighs what is unknown.
_WORST_FIRST = (Health.FAILED, Health.DEGRADED, Health.UNKNOWN, Health.OK)


def worst(findings: Mapping[int, F], rank: Callable[[F], Any] = lambda _: 0) -> F:
    """The finding of the engine that is worst off; its reason says how the others are.  Of several of one health it is
    that of the lowest rank, of equals the first.

    Nothing is averaged: a replica that is damaged answers its own share of the requests.
    """
    engine, finding = min(findings.items(), key=lambda item: (_WORST_FIRST.index(item[1].health), rank(item[1])))
    if len(findings) == 1:
        return finding
    others = ", ".join(f"engine {other} is {findings[other].health.value}" for other in findings if other != engine)
    reason = f"Engine {engine}: {finding.reason.rstrip('.')}; {others}"
    return finding.model_copy(update={"reason": reason})
