"""The table: every combination of evidence comes to one row, every row is reached, nothing unknown reads as good."""

from itertools import product

import pytest

from flipwatch.monitors.finding import Health
from flipwatch.monitors.verdict.evidence import Answer, Question
from flipwatch.monitors.verdict.table import TABLE, first_fit
from flipwatch.monitors.verdict.verdict import Verdict

COMBINATIONS = [dict(zip(Question, answers, strict=True)) for answers in product(Answer, repeat=len(Question))]
YES, NO, UNKNOWN = Answer.YES, Answer.NO, Answer.UNKNOWN


def test_every_combination_comes_to_one_row_and_every_row_is_reached() -> None:
    """All 3^7 combinations fit somewhere, and no row lies wholly in the shadow of those above it."""
    assert len(COMBINATIONS) == 3**7
    reached = [next(at for at, row in enumerate(TABLE) if row.fits(answers)) for answers in COMBINATIONS]
    assert sorted(set(reached)) == list(range(len(TABLE)))
    assert all(first_fit(answers) is TABLE[at] for answers, at in zip(COMBINATIONS, reached, strict=True))


def test_every_verdict_has_a_row() -> None:
    """No state of a server exists on paper only."""
    assert {row.verdict for row in TABLE} == set(Verdict)


def test_only_full_evidence_is_good() -> None:
    """`ok` and `mitigated` ask for bytes, blocks and answers that are known, `ok` for the heartbeat, too."""
    for answers in COMBINATIONS:
        row = first_fit(answers)
        if row.verdict is Verdict.OK:
            assert {
                answers[question] for question in Question if question not in (Question.LOSS_OFF, Question.LOADED_BAD)
            } == {NO}
        if row.health is Health.OK:
            assert row.verdict is Verdict.OK
        if row.verdict in (Verdict.OK, Verdict.MITIGATED):
            assert answers[Question.ANSWERS_WRONG] is NO
            assert answers[Question.BLOCK_STANDS_OUT] is NO
            assert answers[Question.BYTES_CHANGED] is not UNKNOWN


def test_what_is_bad_is_never_only_unknown() -> None:
    """With any sign of a fault the health is failed or degraded, whatever else is missing."""
    bad = [question for question in Question if question is not Question.MITIGATED]
    for answers in COMBINATIONS:
        if any(answers[question] is YES for question in bad):
            assert first_fit(answers).health in (Health.FAILED, Health.DEGRADED)


@pytest.mark.parametrize("question", [Question.BYTES_CHANGED, Question.BLOCK_STANDS_OUT, Question.ANSWERS_WRONG])
def test_learning_what_was_unknown_never_turns_good_into_bad_silently(question: Question) -> None:
    """Where evidence is missing, the verdict is no better than with either answer to it."""
    better = (Verdict.OK, Verdict.MITIGATED)
    for answers in COMBINATIONS:
        if answers[question] is UNKNOWN and first_fit(answers).verdict in better:
            raise AssertionError(answers)
