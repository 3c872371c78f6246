"""Recordings of a model: under which conditions one is made, and which states must not become one."""

import math

from ..monitors.differential.divergence import decode
from ..monitors.differential.facts import STREAM, DifferentialReading
from ..monitors.differential.reference import Conditions
from ..monitors.wire import ModelFacts


def conditions(facts: ModelFacts) -> Conditions:
    """Under which a reading of this model is made."""
    return Conditions(
        model=facts.model,
        model_digest=facts.model_digest,
        architecture=facts.architecture,
        num_blocks=facts.num_blocks,
        dtype=facts.dtype,
        engine=f"vllm {facts.vllm_version} {facts.mode}",
        torch_version=facts.torch_version,
        hardware=facts.hardware,
        tensor_parallel_size=facts.tensor_parallel_size,
        flipwatch_version=facts.flipwatch_version,
    )


def not_finite(reading: DifferentialReading, size: int) -> str | None:
    """Which states are not finite, so that nothing could be held against them, one sentence; None when all are.

    `size` is the K of the plan.  Raises `ValueError` for a sketch that cannot be decoded.
    """
    losses = [rank.nats for rank in reading.ranks]
    if not any(nats and None not in nats for nats in losses):
        return "The loss of the model is not finite on all sequences: find out why, then record."
    for rank in reading.ranks:
        for states in rank.isolated:
            rows = [decode(point.sketch, size) for point in states.points if point.module == STREAM]
            if not rows or not all(math.isfinite(value) for row in rows[0] for value in row):
                return f"Block {states.block} puts out values that are not finite: find out why, then record."
    return None
