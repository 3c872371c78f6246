"""A fault as JSON, whatever tensor it strikes."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from ..strict import Wire

FACTORS = {"burst": 64.0, "neighbours": 1.0, "scale": 64.0}
"""The kinds that have a factor, and what it is unless a spec says otherwise."""


class FaultKind(StrEnum):
    """How values are damaged."""

    BIT = "bit"
    """One bit of `count` random values flips: `bit`, counted from the lowest, or the one below the sign bit (the top
    exponent bit of a floating-point value)."""
    BURST = "burst"
    """`count` random values become `factor` (64) times the tensor's largest magnitude, with a random sign."""
    NEIGHBOURS = "neighbours"
    """`count` values side by side become uniform random ones up to `factor` (1) times the largest magnitude."""
    NAN = "nan"
    """A square tile of `count` values becomes NaN; of a 1-D tensor, a run."""
    INF = "inf"
    """`count` random values become Inf, with a random sign."""
    ZEROS = "zeros"
    """A page of `count` consecutive values becomes zero; pages lie at multiples of their length."""
    STALE = "stale"
    """A page of `count` consecutive values becomes what lies at the same place of another tensor."""
    SWAP = "swap"
    """Two random rows change places."""
    SIGN = "sign"
    """One random row is negated."""
    SCALE = "scale"
    """With seed 0 the value of the largest magnitude, else `count` random ones of the top 1 %, times `factor` (64)."""
    LOST = "lost"
    """The whole tensor reads zero, as a buffer does that a wake-up from sleep lost."""
    FLIPS = "flips"
    """The bits in `flips` flip: what a search found."""


Flip = Annotated[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0, le=63)]], Field(strict=False)]
"""Flat index of a value, and the bit of it, counted from the lowest."""


class FaultSpec(Wire):
    """What a fault does, whatever tensor it strikes."""

    model_config = ConfigDict(allow_inf_nan=False)

    kind: FaultKind = Field(strict=False)
    count: int = Field(default=18, ge=1)
    """How many values; more than the tensor has means all.  `swap`, `sign`, `lost` and `flips` do not look at it."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    bit: int | None = Field(default=None, ge=0, le=63)
    """Only for `bit`."""
    factor: float | None = Field(default=None, gt=0)
    """Only for `burst`, `neighbours` and `scale`; None is the kind's own."""
    flips: list[Flip] | None = Field(default=None, min_length=1, max_length=4096)
    """Only for `flips`."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.bit is not None and self.kind is not FaultKind.BIT:
            raise ValueError(f"bit is for kind bit only, not for {self.kind}")
        if self.factor is not None and self.kind not in FACTORS:
            raise ValueError(f"factor is for the kinds {', '.join(FACTORS)} only, not for {self.kind}")
        if (self.flips is not None) != (self.kind is FaultKind.FLIPS):
            raise ValueError("kind flips needs a list of flips, and no other kind takes one")
        if self.flips is not None and len(set(self.flips)) < len(self.flips):
            raise ValueError("flips names a bit twice, which would flip it back")
        return self
