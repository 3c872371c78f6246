"""The two halves of a monitor, and all that it may see of a live model."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel

from .finding import Finding

if TYPE_CHECKING:
    from torch import Tensor

    from .alpha_scan.profile import Profile


class ModelView(Protocol):
    """A live model, block by block.

    `N` sequences of `T` tokens, residual width `D`.  `hidden` holds `M = r * N` sequences, copy-major: row
    `c * N + n` is copy `c` of sequence `n`.  Sequences are right-padded; attention is causal, so padding
    never reaches a scored position.
    """

    num_blocks: int

    @property
    def gates(self) -> list[float]:
        """Alpha per block as served now: 1 normal, 0 skipped."""
        ...

    def embed(self, tokens: "Tensor") -> "Tensor":
        """(N, T) token ids -> (N, T, D) residual stream in front of block 0."""
        ...

    def block(self, index: int, hidden: "Tensor", tokens: "Tensor") -> "Tensor":
        """(M, T, D) stream in front of block `index` -> (M, T, D) stream behind it, gate applied."""
        ...

    def nats(self, hidden: "Tensor", tokens: "Tensor", scored: "Tensor") -> "Tensor":
        """(M, T, D) stream behind the last block -> (M,) mean loss in nats over the scored positions.

        `scored` is (N, T) bool; `scored[n, t]` counts the loss of token `t`, predicted from the tokens
        before it.  Position 0 is never scored.
        """
        ...


V = TypeVar("V")
P = TypeVar("P")
R = TypeVar("R")
F = TypeVar("F", bound=Finding)


class Monitor(ABC, Generic[V, P, R, F]):
    """One detector: facts (`measure`) and judgement (`judge`) apart.

    `V` is what it sees of a model, `P` its plan (what to measure), `R` its reading (numbers only, no threshold), `F`
    its finding.
    """

    name: ClassVar[str]
    plan_type: ClassVar[type[BaseModel]]

    @abstractmethod
    def steps(self, plan: P, num_blocks: int) -> int:
        """How many units of work `measure` yields on a healthy model.

        Raises:
            ValueError: the plan makes no sense; one sentence.
        """

    @abstractmethod
    def measure(self, model: V, plan: P) -> Generator[None, None, R]:
        """Facts.  Runs in every rank in step, under inference mode.

        A generator: it yields after each unit of work (about one block call), so that the service can cut a
        measurement into parts of any length and the engine serves in between.  The reading is its return
        value.  Which units are done must not depend on the clock, nor on a value that differs between ranks.
        """

    def next_plan(self, order: P, readings: Sequence[R], profile: "Profile | None" = None) -> P | None:
        """The plan to measure next, given what was ordered and the readings so far; None when all is measured.

        Judgement: pure, runs in the service.  A monitor that measures once need not say anything.
        """
        return None if readings else order

    @abstractmethod
    def judge(self, readings: Sequence[R], profile: "Profile | None" = None) -> F:
        """Judgement of all readings of one order.  Pure: no clock, no I/O, no torch.  Runs in the service."""
