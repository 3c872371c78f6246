"""A clean profile: what the alpha-scan measured on a model known to be good.

With it a block is compared with its own healthy self, and the base loss with its healthy value on the very same
sequences.  A profile of another model, build, precision, parallel size or validation set would turn differences
between models into findings, so it is refused.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import ConfigDict, Field

from ..wire import Wire
from .plan import AlphaScanPlan
from .reading import AlphaScanReading
from .scores import FORMULAS, mean, scores, shared_alphas

FORMAT = 1

_LARGEST = 1e40
"""Above any loss or score of float32 losses; its square is still a number."""

Nats = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class Provenance(Wire):
    """What a profile belongs to; any difference makes it a profile of something else."""

    model: str
    """Name of the model for people; the digest decides."""
    model_digest: str
    """Hex digest of the weights as they were loaded."""
    architecture: str
    dtype: str
    engine: str
    """What ran the model, with its version and mode, e.g. `vllm 0.32.0 eager`."""
    torch_version: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    validation_digest: str
    """Hex digest of the token sequences and of what is scored in them, see `digest_of`."""


class BlockProfile(Wire):
    """Healthy scores of one block, as in `BlockScore`; None where it could not be computed."""

    model_config = ConfigDict(allow_inf_nan=False)

    bss: Nats | None
    slope: Nats | None
    skip_gain: Nats | None
    largest_deviation: Nats | None


class Profile(Wire):
    """The healthy scores of one model."""

    model_config = ConfigDict(allow_inf_nan=False)

    format: int = Field(default=FORMAT, ge=FORMAT, le=FORMAT)
    provenance: Provenance
    recorded_at: float = Field(ge=0, lt=253_402_300_800)
    """UTC epoch seconds, before the year 10000."""
    alphas: list[float]
    base_nats: list[Nats]
    """(N) loss of each sequence of the validation set, nats per scored token."""
    blocks: list[BlockProfile]

    def cost(self, blocks: Iterable[int]) -> float | None:
        """What the healthy model loses without these blocks, in nats: the sum of what it loses without each.

        Exact for one block; None where one is not known.
        """
        gains = [self.blocks[block].skip_gain for block in blocks]
        known = [gain for gain in gains if gain is not None]
        return -math.fsum(known) if len(known) == len(gains) else None

    def loss_without(self, blocks: Iterable[int], scored_tokens: Sequence[int]) -> float | None:
        """The healthy model's loss without these blocks, in nats; None where it is not known.

        `scored_tokens` are those of the reading to compare with: of other sequences a profile knows nothing.
        """
        if len(scored_tokens) != len(self.base_nats):
            return None
        base, cost = mean(self.base_nats, scored_tokens), self.cost(blocks)
        return None if base is None or cost is None else base + cost


class UnusableReading(ValueError):
    """No profile can be made of this reading; the text says why in one sentence."""


def make_profile(reading: AlphaScanReading, provenance: Provenance, recorded_at: float) -> Profile:
    """A profile of one reading of the whole model, nothing gated or left out.

    Raises `UnusableReading`.
    """
    if any(gate != 1.0 for gate in reading.gates) or reading.left_out:
        raise UnusableReading("The model is mitigated: undo that, a profile must show the whole model.")
    base = [loss for loss in reading.base_nats if loss is not None]
    if not reading.complete or len(base) < len(reading.base_nats) or not base:
        raise UnusableReading("The model's loss is not finite or a block explodes: this is no clean model.")
    measured = scores(reading)
    if any(score.skip_gain is None for score in measured):
        raise UnusableReading("Some block was not measured: record with a grid that holds 0 and on all blocks.")
    return Profile(
        provenance=provenance,
        recorded_at=recorded_at,
        alphas=shared_alphas(reading),
        base_nats=base,
        blocks=[BlockProfile(**{name: getattr(score, name) for name in FORMULAS}) for score in measured],
    )


def difference(profile: Provenance, live: Provenance) -> str | None:
    """Why a profile of `profile` says nothing about `live`, one sentence; None when it does.  Names do not count."""
    fields = [name for name in Provenance.model_fields if name != "model"]
    different = [name for name in fields if getattr(profile, name) != getattr(live, name)]
    if not different:
        return None
    told = "; ".join(f"{name} {getattr(profile, name)} there, {getattr(live, name)} here" for name in different)
    return f"The profile was recorded under other conditions: {told}."


def digest_of(plan: AlphaScanPlan) -> str:
    """Hex digest of the plan's sequences and scored positions."""
    return _digest([plan.tokens, plan.scored_from])


def _digest(content: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:32]
