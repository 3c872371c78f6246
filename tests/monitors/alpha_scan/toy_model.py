"""A toy model whose losses are a formula, and whole scans of it.

Each block adds to a coordinate of its own, so that `g` of each block can be read off the stream.  The loss of a
sequence whose first token is `t`:

    2 + t / 100 + sum over blocks of worth (1 - g)^2 + harm g (1 +- spread * (t mod 5 - 2)),  at most `cap`

The spread is positive for even blocks and negative for odd ones.  A healthy block has a worth and no harm; one with
more harm than worth is better left out.  A block that adds a lot on some sequences only does harm on those only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flipwatch.monitors.alpha_scan import (
    QUICK_GRID,
    AlphaScan,
    AlphaScanFinding,
    AlphaScanPlan,
    AlphaScanReading,
    Strategy,
    Thresholds,
)

from .random_model import drain

BLOCKS = 12


@dataclass
class ToyModel:
    """See the module's docstring."""

    harm: Mapping[int, float] = field(default_factory=dict)
    worth: Sequence[float] = tuple(0.3 + 0.01 * (block % 5) for block in range(BLOCKS))
    size: Mapping[int, float] = field(default_factory=dict)
    """What a block adds, if not 1: an exploding block adds a lot."""
    large_from: int = 0
    """First token from which on those blocks add so much."""
    nan: frozenset[int] = frozenset()
    spread: float = 0.1
    cap: float = torch.inf
    too_much: float = torch.inf
    """A larger value in the stream makes the loss NaN."""
    gates: list[float] = field(default_factory=lambda: [1.0] * BLOCKS)
    num_blocks: int = BLOCKS

    def embed(self, tokens: Tensor) -> Tensor:
        """Zeros, and a coordinate that is 1 and stays so."""
        hidden = torch.zeros(*tokens.shape, BLOCKS + 1, dtype=torch.float64)
        hidden[..., BLOCKS] = 1.0
        return hidden

    def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        out = hidden.clone()
        if index in self.nan:
            out[:] = torch.nan
        out[..., index] += self.gates[index] * self._sizes(index, hidden.shape[0], tokens)[:, None]
        return out

    def nats(self, hidden: Tensor, tokens: Tensor, scored: Tensor) -> Tensor:
        first = tokens[:, 0].repeat(hidden.shape[0] // tokens.shape[0]).double()
        losses = 2.0 + first / 100
        for index in range(BLOCKS):
            g = hidden[:, -1, index] / self._sizes(index, hidden.shape[0], tokens)
            noise = 1 + self.spread * (first % 5 - 2) * (-1) ** index
            harm = torch.where(self._acts(index, first), self.harm.get(index, 0.0), 0.0)
            losses = losses + self.worth[index] * (1 - g) ** 2 + harm * g * noise
        losses = losses.clamp_max(self.cap)
        return torch.where(hidden.abs().amax((1, 2)) > self.too_much, torch.nan, losses)

    def loss(self, left_out: Sequence[int] = (), tokens: Sequence[int] = range(16)) -> float:
        """Mean loss over sequences with these first tokens, by the formula."""
        losses = []
        for t in tokens:
            total = 2.0 + t / 100 + sum(self.worth[block] for block in left_out)
            total += sum(
                h * (1 + self.spread * (t % 5 - 2) * (-1) ** b) for b, h in self.harm.items() if b not in left_out
            )
            losses.append(min(total, self.cap))
        return sum(losses) / len(losses)

    def _sizes(self, index: int, rows: int, tokens: Tensor) -> Tensor:
        first = tokens[:, 0].repeat(rows // tokens.shape[0])
        return torch.where(self._acts(index, first), self.size.get(index, 1.0), 1.0).double()

    def _acts(self, index: int, first: Tensor) -> Tensor:
        return (first >= self.large_from) | torch.tensor(index not in self.size)


def toy_plan(sequences: int = 16, alphas: Sequence[float] = QUICK_GRID) -> AlphaScanPlan:
    """Sequences of three tokens; the first is the number of the sequence."""
    return AlphaScanPlan(alphas=list(alphas), tokens=[[n, 7, 8] for n in range(sequences)], scored_from=[1] * sequences)


@dataclass
class Scan:
    """All that a scan did and found."""

    finding: AlphaScanFinding
    plans: list[AlphaScanPlan]
    readings: list[AlphaScanReading]


def scanned(
    model: ToyModel,
    order: AlphaScanPlan | None = None,
    strategy: Strategy = Strategy.PLAIN,
    *,
    max_faults: int = 3,
    thresholds: Thresholds = Thresholds(),  # noqa: B008 - frozen
) -> Scan:
    """Measure all that an order leads to, and judge it."""
    monitor = AlphaScan(thresholds, strategy, max_faults)
    order = order or toy_plan()
    plans: list[AlphaScanPlan] = []
    readings: list[AlphaScanReading] = []
    while (plan := monitor.next_plan(order, readings)) is not None:
        AlphaScanPlan.model_validate(plan.model_dump())
        plans.append(plan)
        readings.append(drain(monitor.measure(model, plan))[0])
        assert len(plans) < 20, "the scan does not come to an end"
    return Scan(monitor.judge(readings), plans, readings)
