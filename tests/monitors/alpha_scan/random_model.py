"""A small random model with causal mixing, and losses of it measured the slow way."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flipwatch.monitors.alpha_scan import QUICK_GRID, AlphaScanPlan, AlphaScanReading

VOCAB, WIDTH = 17, 8


@dataclass
class RandomModel:
    """A ModelView in float64: block l adds tanh(mean of the past @ W_l)."""

    num_blocks: int = 5
    gates: list[float] = field(default_factory=list)
    calls: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        make = torch.Generator().manual_seed(3)
        self.gates = self.gates or [1.0] * self.num_blocks
        self.table = torch.randn(VOCAB, WIDTH, generator=make, dtype=torch.float64)
        self.weights = torch.randn(self.num_blocks, WIDTH, WIDTH, generator=make, dtype=torch.float64)
        self.head = torch.randn(WIDTH, VOCAB, generator=make, dtype=torch.float64)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        self.calls.append((index, hidden.shape[0], hidden.shape[1]))
        assert hidden.shape[0] % tokens.shape[0] == 0
        past = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[None, :, None]
        out = hidden + torch.tanh(past @ self.weights[index])
        gate = self.gates[index]
        return hidden if gate == 0.0 else hidden + gate * (out - hidden)

    def nats(self, hidden: Tensor, tokens: Tensor, scored: Tensor) -> Tensor:
        copies = hidden.shape[0] // tokens.shape[0]
        logits = (hidden @ self.head)[:, :-1].transpose(1, 2)
        losses = functional.cross_entropy(logits, tokens.repeat(copies, 1)[:, 1:], reduction="none")
        mask = scored.repeat(copies, 1)[:, 1:]
        return (losses * mask).sum(1) / mask.sum(1)


def plan(alphas: Sequence[float] = QUICK_GRID, tokens_per_step: int = 30) -> AlphaScanPlan:
    """Five sequences of different lengths, not sorted."""
    make = torch.Generator().manual_seed(5)
    lengths = [4, 7, 3, 7, 5]
    return AlphaScanPlan(
        alphas=list(alphas),
        tokens=[torch.randint(VOCAB, (n,), generator=make).tolist() for n in lengths],
        scored_from=[1, 3, 2, 1, 4],
        tokens_per_step=tokens_per_step,
    )


def changed(order: AlphaScanPlan, **changes: Any) -> AlphaScanPlan:
    """The plan with other options, checked as a new one is."""
    return AlphaScanPlan.model_validate(order.model_dump() | changes)


def drain(steps: Generator[None, None, AlphaScanReading]) -> tuple[AlphaScanReading, int]:
    """The reading and the number of yields."""
    readings = []

    def caught() -> Generator[None, None, None]:
        readings.append((yield from steps))

    count = sum(1 for _ in caught())
    return readings[0], count


def naive(
    model: RandomModel,
    order: AlphaScanPlan,
    scaled: range = range(0),
    alpha: float = 1.0,
    left_out: Sequence[int] = (),
) -> list[float]:
    """Loss of each sequence by a full pass of its own, what the blocks `scaled` add together taken `alpha` times."""
    losses = []
    for row, first in zip(order.tokens, order.scored_from, strict=True):
        tokens = torch.tensor([row])
        scored = torch.arange(len(row))[None, :] >= first
        h = model.embed(tokens)
        for index in range(model.num_blocks):
            if index == scaled.start:
                before = h
            if index not in left_out:
                h = model.block(index, h, tokens)
            if index == scaled.stop - 1:
                h = before + alpha * (h - before)
        losses.append(float(model.nats(h, tokens, scored)))
    return losses
