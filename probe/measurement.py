"""What a worker can be asked to measure: the monitors, and procedures on the bytes of the weights."""

from base64 import b64decode
from collections.abc import Generator, Mapping
from typing import Any

import torch

from ..monitors.alpha_scan import AlphaScan
from ..monitors.differential.facts import DifferentialPlan
from ..monitors.differential.monitor import Differential
from ..monitors.fingerprint.facts import COMPARE, CORRECT, RECORD, CorrectionPlan, FingerprintPlan, Recorded
from ..monitors.fingerprint.monitor import Fingerprint
from ..monitors.fingerprint.sealed import SealedWeights
from ..monitors.table import MONITORS
from .armed import Armed
from .checkpoint import CheckpointUnusable
from .comparison import compare
from .correction import correct
from .ranks import Ranks
from .refused import Refused

OF_BYTES = frozenset({Fingerprint.name, RECORD, COMPARE, CORRECT})
"""What reads the bytes of the weights and computes nothing with them."""

Steps = Generator[None, None, Any]
"""Yields after each unit of work and returns the reading."""


def begin(armed: Armed, name: str, plan: dict[str, Any], as_if: Mapping[int, float]) -> tuple[Steps, int]:
    """The measurement of this name, and how many units of work it is; `as_if` are gates in place of the served ones.

    Raises:
        Refused: no such name, or the plan does not fit the server.
        UnsupportedModel: not of this model; one sentence.
        ValueError: the plan makes no sense.
    """
    if as_if and name != AlphaScan.name:
        raise Refused(422, f"Only {AlphaScan.name} measures a model as if it had other gates, {name} does not.")
    if unknown := [block for block in as_if if block >= armed.stack.num_blocks]:
        last = armed.stack.num_blocks - 1
        raise Refused(404, f"Block {unknown[0]} does not exist; this model has blocks 0 to {last}.")
    if name == RECORD:
        whole = FingerprintPlan.model_validate(plan)
        return _record(armed.bytes(), whole), whole.steps
    if name == COMPARE:
        FingerprintPlan.model_validate(plan)
        return compare(armed), armed.stack.num_blocks + 1
    if name == CORRECT:
        wanted = CorrectionPlan.model_validate(plan)
        _check_named(wanted, armed)
        return correct(armed, wanted), len(wanted.tensors)
    if name not in MONITORS:
        raise Refused(404, f"There is no monitor {name!r}; known are {', '.join(sorted(MONITORS))}.")
    detector = MONITORS[name]()
    order: Any = detector.plan_type.model_validate(plan)
    if isinstance(detector, Fingerprint):
        return detector.measure(armed.bytes(), order), detector.steps(order, armed.stack.num_blocks)
    if isinstance(detector, Differential):
        _check_differential(order, armed)
        try:
            dissection = armed.dissection(checkpoint=order.checkpoint)
        except CheckpointUnusable as reason:
            raise Refused(409, str(reason)) from None
        return detector.measure(dissection, order), detector.steps(order, armed.stack.num_blocks)
    view = armed.view(as_if)
    total = detector.steps(order, view.num_blocks)
    _check_size(order, armed)
    return detector.measure(view, order), total


def _record(sealed: SealedWeights, plan: FingerprintPlan) -> Steps:
    changed = yield from sealed.record(plan.steps)
    return Recorded(ranks=[sealed.facts()], changed_chunks=changed)


def _check_named(plan: CorrectionPlan, armed: Armed) -> None:
    """Stages of a pipeline have different tensors: only what no rank has is refused."""
    known = {stretch.source.name for stretch in armed.bytes().line.stretches}
    ranks = Ranks.here().gathered([name in known for name in plan.tensors])
    for name, *found in zip(plan.tensors, *ranks, strict=True):
        if not any(found):
            raise Refused(404, f"There is no tensor {name!r}: give the full name, as a finding has it.")


def _check_differential(plan: DifferentialPlan, armed: Armed) -> None:
    longest = max(len(row) for row in plan.tokens)
    _check_tokens(plan.tokens, longest * len(plan.tokens), armed)
    if plan.inputs is None or plan.inputs_dtype is None:
        return
    width = getattr(torch, plan.inputs_dtype).itemsize * armed.vllm_config.model_config.get_hidden_size()
    wanted = min(plan.prefix, len(plan.tokens[0])) * width
    for block, text in enumerate(plan.inputs):
        try:
            size = len(b64decode(text, validate=True))
        except ValueError:
            raise Refused(422, f"The input of block {block} is not base64.") from None
        if size != wanted:
            raise Refused(422, f"The input of block {block} has {size} bytes, and this model takes {wanted}.")


def _check_size(plan: Any, armed: Armed) -> None:
    longest = max(len(row) for row in plan.tokens)
    _check_tokens(plan.tokens, longest * max(1, len(plan.alphas)), armed)
    limit = armed.vllm_config.scheduler_config.max_num_batched_tokens
    if plan.tokens_per_step > limit:
        raise Refused(422, f"tokens_per_step is at most {limit} on this server.")


def _check_tokens(tokens: list[list[int]], at_once: int, armed: Armed) -> None:
    config = armed.vllm_config
    limit = config.scheduler_config.max_num_batched_tokens
    longest = max(len(row) for row in tokens)
    if longest > config.model_config.max_model_len or at_once > limit:
        raise Refused(
            422,
            f"A plan of sequences of {longest} tokens, {at_once} tokens at once, is more than this server takes "
            f"({limit} tokens); use shorter sequences, or fewer of them or of the alphas.",
        )
    vocabulary = config.model_config.get_vocab_size()
    if any(not 0 <= token < vocabulary for row in tokens for token in row):
        raise Refused(422, f"A token id lies outside the model's vocabulary of {vocabulary}.")
