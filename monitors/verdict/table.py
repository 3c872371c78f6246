"""Which pattern of evidence is which verdict.  The first row that fits counts; the last one fits everything.

A question that a row does not name may have any answer.  What is not known never makes a verdict better: `ok` and
`mitigated` ask that bytes, blocks, answers and the heartbeat are known, and where something is bad that no row can tell
the kind of, the verdict is `unknown` and the health is `failed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..finding import Action, Health
from .evidence import Answer, Question
from .verdict import Verdict

YES, NO, UNKNOWN = Answer.YES, Answer.NO, Answer.UNKNOWN

HUNG = Question.HUNG
BYTES = Question.BYTES_CHANGED
BLOCK = Question.BLOCK_STANDS_OUT
LOSS = Question.LOSS_OFF
ANSWERS = Question.ANSWERS_WRONG
MITIGATED = Question.MITIGATED
LOADED_BAD = Question.LOADED_BAD


@dataclass(frozen=True)
class Row:
    """One pattern, what it means and what to do."""

    pattern: Mapping[Question, Answer]
    verdict: Verdict
    health: Health
    sentence: str
    """What it means; without the full stop."""
    action: Action
    """The first thing to try."""
    advice: str
    """That and what else helps, for people."""

    def fits(self, answers: Mapping[Question, Answer]) -> bool:
        """Whether the evidence has this pattern."""
        return all(answers[question] is answer for question, answer in self.pattern.items())


_REPAIR = "Repair; where that fails, skip the block; else restart vLLM."
_CORRECT = (
    "Compare with the checkpoint: where a tensor differs, correct the baseline and repair; where none does, suspect a "
    "kernel or the hardware. Until then skip the block."
)
_SOURCE = "Check the checkpoint against its publisher; correct the baseline and repair, or load a good one."
_LOOK = "Sweep the weights, scan and ask the canary again; the reason says what is missing."

TABLE: tuple[Row, ...] = (
    Row(
        {HUNG: YES},
        Verdict.HUNG,
        Health.FAILED,
        "Requests are there, and nothing moves",
        Action.DRAIN,
        "Take the server out of rotation, and restart vLLM.",
    ),
    Row(
        {BYTES: YES, BLOCK: YES},
        Verdict.WEIGHT_FAULT,
        Health.FAILED,
        "Bytes of the weights have changed, and a block does harm",
        Action.REPAIR,
        _REPAIR,
    ),
    Row(
        {BYTES: YES, ANSWERS: YES},
        Verdict.WEIGHT_FAULT,
        Health.FAILED,
        "Bytes of the weights have changed, and the answers are wrong",
        Action.REPAIR,
        _REPAIR,
    ),
    Row(
        {BYTES: YES, LOSS: YES},
        Verdict.WEIGHT_FAULT,
        Health.FAILED,
        "Bytes of the weights have changed, and the loss shows it",
        Action.REPAIR,
        _REPAIR,
    ),
    Row(
        {BYTES: NO, BLOCK: YES},
        Verdict.OLD_FAULT,
        Health.FAILED,
        "No byte has changed, and a block is bad: wrong since before the baseline, or a compute fault",
        Action.SKIP,
        _CORRECT,
    ),
    Row(
        {BYTES: NO, LOSS: YES},
        Verdict.OLD_FAULT,
        Health.FAILED,
        "No byte has changed, and the loss is not what it was: wrong since before the baseline, or a compute fault",
        Action.INVESTIGATE,
        _SOURCE,
    ),
    Row(
        {BYTES: NO, BLOCK: NO, ANSWERS: YES, LOADED_BAD: YES},
        Verdict.OLD_FAULT,
        Health.FAILED,
        "The weights were loaded bad, and the answers are wrong",
        Action.INVESTIGATE,
        _SOURCE,
    ),
    Row(
        {BYTES: NO, BLOCK: NO, ANSWERS: YES, MITIGATED: YES},
        Verdict.SERVING_FAULT,
        Health.FAILED,
        "Weights and blocks are good, and the answers of the gated model are wrong",
        Action.INVESTIGATE,
        "Undo the mitigation: the model may not do without that block. If that does not help, drain.",
    ),
    Row(
        {BYTES: NO, BLOCK: NO, ANSWERS: YES},
        Verdict.SERVING_FAULT,
        Health.FAILED,
        "Weights and blocks are good, and the answers are wrong: KV cache, graph, sampler or kernel",
        Action.DRAIN,
        "Take the server out of rotation; reset the prefix cache or restart vLLM.",
    ),
    Row(
        {MITIGATED: YES, BYTES: YES, BLOCK: NO, ANSWERS: NO},
        Verdict.MITIGATED,
        Health.DEGRADED,
        "Sane with blocks gated, and bytes of the weights have changed",
        Action.REPAIR,
        "Repair: it ends the skip of the repaired block.",
    ),
    Row(
        {MITIGATED: YES, BYTES: NO, BLOCK: NO, ANSWERS: NO, HUNG: NO},
        Verdict.MITIGATED,
        Health.DEGRADED,
        "Sane with blocks gated",
        Action.NONE,
        "Nothing has to be done now. Undo the mitigation when its reason is gone.",
    ),
    Row(
        {BYTES: YES, BLOCK: NO, ANSWERS: NO},
        Verdict.LATENT_WEIGHT_FAULT,
        Health.DEGRADED,
        "Bytes of the weights have changed, and nothing else shows it",
        Action.REPAIR,
        "Repair; do not ignore it: other texts may show it.",
    ),
    Row(
        {BYTES: YES},
        Verdict.LATENT_WEIGHT_FAULT,
        Health.FAILED,
        "Bytes of the weights have changed, and whether it shows is not known",
        Action.REPAIR,
        "Repair; scan and ask the canary to learn what it does.",
    ),
    Row(
        {BYTES: NO, LOADED_BAD: YES},
        Verdict.OLD_FAULT,
        Health.FAILED,
        "No byte has changed, and the weights were loaded bad",
        Action.INVESTIGATE,
        _SOURCE,
    ),
    Row(
        {BYTES: NO, BLOCK: NO, ANSWERS: NO, HUNG: NO, MITIGATED: NO},
        Verdict.OK,
        Health.OK,
        "Weights, blocks and answers are good",
        Action.NONE,
        "Nothing has to be done.",
    ),
    Row(
        {BLOCK: YES},
        Verdict.UNKNOWN,
        Health.FAILED,
        "A block is bad, and whether bytes have changed is not known",
        Action.INVESTIGATE,
        _LOOK,
    ),
    Row(
        {LOSS: YES},
        Verdict.UNKNOWN,
        Health.FAILED,
        "The loss is not what it was, and whether bytes have changed is not known",
        Action.INVESTIGATE,
        _LOOK,
    ),
    Row(
        {ANSWERS: YES},
        Verdict.UNKNOWN,
        Health.FAILED,
        "The answers are wrong, and whether weights and blocks are good is not known",
        Action.INVESTIGATE,
        _LOOK,
    ),
    Row(
        {LOADED_BAD: YES},
        Verdict.UNKNOWN,
        Health.FAILED,
        "The weights were loaded bad, and whether bytes have changed since is not known",
        Action.INVESTIGATE,
        _LOOK,
    ),
    Row(
        {},
        Verdict.UNKNOWN,
        Health.UNKNOWN,
        "The evidence does not suffice",
        Action.INVESTIGATE,
        _LOOK,
    ),
)


def first_fit(answers: Mapping[Question, Answer]) -> Row:
    """The row that counts."""
    return next(row for row in TABLE if row.fits(answers))
