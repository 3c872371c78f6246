"""What a PromQL query is made of."""

from datetime import timedelta
from typing import NamedTuple

import promql_parser


class Selector(NamedTuple):
    """One selector of series in a query."""

    metric: str
    """Of `vllm[:_]x` it is `vllm:x`, as vLLM's source has it."""
    matchers: frozenset[str]
    """Such as `job=~"x"`."""
    function: str | None
    """That its range is an argument of; None for a selector without a range."""
    range: timedelta | None


def selectors(expression: str) -> list[Selector]:
    """All selectors of a query; `ValueError` for one that is no PromQL."""
    found: list[Selector] = []
    around: list[promql_parser.Expr] = []

    def enter(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            matrix = around[-1] if around and isinstance(around[-1], promql_parser.MatrixSelector) else None
            call = around[-2] if matrix is not None else None
            assert not node.matchers.or_matchers, "Prometheus itself knows no `or` between matchers."
            matchers = {matcher.name: matcher for matcher in node.matchers.matchers}
            name = node.name or matchers.pop("__name__").value.replace("[:_]", ":")
            found.append(
                Selector(
                    name,
                    frozenset(map(str, matchers.values())),
                    call.func.name if isinstance(call, promql_parser.Call) else None,
                    None if matrix is None else matrix.range,
                )
            )
        around.append(node)

    promql_parser.walk(promql_parser.parse(expression), enter, lambda _: around.pop() and None)
    return found
