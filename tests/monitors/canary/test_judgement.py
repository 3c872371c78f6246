"""From answers to a finding: what is expected, what is allowed, and each symptom."""

import math
from typing import Any

import pytest

from flipwatch.monitors.canary.answers import Answer, CanaryReading, Failure
from flipwatch.monitors.canary.expectation import (
    FACTOR,
    FLOOR,
    Expectation,
    ReferenceKind,
    Unstable,
    compare,
    make_expectation,
    misfit,
)
from flipwatch.monitors.canary.finding import CanaryFinding, Symptom
from flipwatch.monitors.canary.judgement import REPEATED, Reference, judge
from flipwatch.monitors.canary.plan import MAX_TOKENS, PROMPTS
from flipwatch.monitors.differential.reference import Conditions
from flipwatch.monitors.finding import Action, Health

CONDITIONS = Conditions(
    model="toy",
    model_digest="ab",
    architecture="Toy",
    num_blocks=2,
    dtype="bfloat16",
    engine="vllm 0.32.0 eager",
    torch_version="2",
    hardware="cpu",
    tensor_parallel_size=1,
    flipwatch_version="0.1.0",
)


def answer(place: int = 0, *, lower: float = 0.0, margin: float = 2.0, flip: int | None = None) -> Answer:
    """Sixteen tokens of -0.5 nats; `lower` by so much, another token at `flip`."""
    tokens = [100 * place + at for at in range(MAX_TOKENS)]
    if flip is not None:
        tokens[flip] = 9
    return Answer(
        tokens=tuple(tokens), logprobs=(-0.5 - lower,) * MAX_TOKENS, margins=(margin,) * MAX_TOKENS, seconds=0.1
    )


SHORT = Answer(tokens=answer(4).tokens[:3], logprobs=(-0.5,) * 3, margins=(2.0,) * 3)
"""The answer to prompt 4, ended early."""


def run(**more: Any) -> tuple[Answer, ...]:
    """All prompts."""
    return tuple(answer(place, **more) for place in range(len(PROMPTS)))


def reading(changed: dict[int, Answer] | None = None, cached: dict[int, Answer] | None = None) -> CanaryReading:
    """Sound answers, but for these; those from the cache are the same unless told."""
    anew = {**dict(enumerate(run())), **(changed or {})}
    again = {**anew, **(cached or {})}
    return CanaryReading(anew=tuple(anew.values()), again=tuple(again.values()))


def expected(*runs: tuple[Answer, ...]) -> Expectation:
    """What these runs make."""
    return make_expectation(runs or (run(), run(lower=0.01)), CONDITIONS, 0.0)


def judged(found: CanaryReading, kind: ReferenceKind = ReferenceKind.RECORDED) -> CanaryFinding:
    """Against the usual expectation."""
    return judge(found, Reference(kind, expected()), "")


def test_the_tolerance_is_measured() -> None:
    """A few times the largest scatter of the runs, in units of 1 - p, and no less than the floor."""
    scatter = 0.1 / (1 - math.exp(-0.5))
    made = expected(run(), run(lower=0.1), run(lower=-0.05))
    assert (made.runs, made.scatter, made.tolerance) == (3, pytest.approx(scatter), pytest.approx(FACTOR * scatter))
    assert expected(run(), run()).tolerance == FLOOR


def test_a_sure_token_is_allowed_less() -> None:
    """The same move counts for more where the model is sure."""
    sure, unsure = (
        make_expectation([(Answer(tokens=(1,), logprobs=(value,), margins=(3.0,)),)], CONDITIONS, 0.0)
        for value in (-0.1, -2.0)
    )
    moved = [
        compare(made.answers[0], Answer(tokens=(1,), logprobs=(value - 0.2,), margins=(3.0,)), made.tolerance)
        for made, value in ((sure, -0.1), (unsure, -2.0))
    ]
    assert moved[0] is not None
    assert moved[1] is not None
    assert moved[0].scatter > 5 * moved[1].scatter


def test_nothing_behind_a_token_that_rounding_turned_is_expected() -> None:
    """Where two runs part at a near tie the answer ends; the move says how far rounding reaches."""
    first, other = list(run(margin=0.05)), list(run(margin=0.05))
    other[2] = answer(2, flip=5)
    made = expected(tuple(first), tuple(other))
    assert [len(one.tokens) for one in made.answers] == [16, 16, 5, 16, 16, 16]
    assert made.scatter == 0.05


def test_runs_that_differ_by_more_than_rounding_make_no_expectation() -> None:
    """A token that was sure and turned, or a log probability that jumped."""
    with pytest.raises(Unstable, match="no rounding"):
        expected(run(), (*run()[:5], answer(5, flip=3)))
    with pytest.raises(Unstable, match="3 runs scatter"):
        expected(run(), run(), run(lower=0.5))


def test_a_near_tie_that_turns_later_is_no_fault() -> None:
    """The comparison stops there; what came before counts."""
    made = expected(run(margin=0.05), run(margin=0.05))
    assert compare(made.answers[0], answer(0, flip=3), made.tolerance) == (0.0, 0, -0.5, -0.5, False)
    assert compare(made.answers[0], answer(0, flip=0), made.tolerance) is None
    found = judge(reading({0: answer(0, flip=3)}), Reference(ReferenceKind.FIRST, made), "")
    assert (found.health, found.symptom) == (Health.OK, Symptom.NONE)


def test_sound_answers_are_ok_with_numbers() -> None:
    """The reason says how many, how far, how far is allowed, and against what."""
    found = judged(reading({3: answer(3, lower=0.005)}))
    assert (found.health, found.symptom, found.reference, found.answered) == (
        Health.OK,
        Symptom.NONE,
        ReferenceKind.RECORDED,
        6,
    )
    assert found.reason == (
        "6 prompts were answered twice, sound and the same from the prefix cache; the largest scatter is 0.0127, 0.1 "
        "is allowed (against the answers recorded at 1970-01-01 00:00:00 UTC)."
    )
    assert (found.scatter, found.tolerance, found.seconds) == (pytest.approx(0.0127, abs=1e-4), 0.1, 0.1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (answer(4, flip=7), "4 has at token 7 another of -0.5 nats instead of the one expected (-0.5 nats)"),
        (answer(4, lower=0.2), "4 has at token 0 -0.7 nats instead of -0.5 expected, a scatter of 0.508"),
        (SHORT, "4 has at token 3 the end instead of the one"),
    ],
)
def test_other_answers_than_expected(changed: Answer, words: str) -> None:
    """Another token, the same with another probability, or an answer that ends early."""
    found = judged(reading({4: changed}))
    assert (found.health, found.symptom, found.wrong) == (Health.FAILED, Symptom.CHANGED, (4,))
    assert found.action is Action.INVESTIGATE
    assert words in found.reason
    assert found.reason.startswith("1 of 6 prompts (4) are answered wrong")


def test_the_cache_differs() -> None:
    """What is computed anew is right, and the same prompt from the prefix cache is not."""
    found = judged(reading(cached={5: answer(5, flip=2)}))
    assert (found.symptom, found.wrong) == (Symptom.CACHE_DIFFERS, (5,))
    assert (
        "5 from the prefix cache has at token 2 another of -0.5 nats instead of the one computed anew" in found.reason
    )
    without = judge(reading(cached={5: answer(5, flip=2)}), None, "there is none")
    assert (without.health, without.symptom) == (Health.FAILED, Symptom.CACHE_DIFFERS)


@pytest.mark.parametrize(
    "bad",
    [
        Answer(failure=Failure.NOT_FINITE, detail="has log probabilities that are no finite numbers"),
        Answer(tokens=(1, 2), logprobs=(-0.1, None), margins=(1.0, None)),
        Answer(),
    ],
)
def test_what_is_not_finite_is_told_first(bad: Answer) -> None:
    """Also from the cache alone, also without a reference, also beside another symptom."""
    for found in (judge(reading(cached={1: bad}), None, "x"), judged(reading({1: bad, 2: answer(2, flip=1)}))):
        assert (found.health, found.symptom, found.wrong) == (Health.FAILED, Symptom.NOT_FINITE, (1,))


def test_one_token_over_and_over_is_degenerate() -> None:
    """In half of the answers: a single one may be the prompt's own fault."""
    stuck = Answer(tokens=(5,) * REPEATED + (1,), logprobs=(-1.0,) * 9, margins=(1.0,) * 9)
    found = judge(reading(dict.fromkeys(range(3), stuck)), None, "x")
    assert (found.health, found.symptom, found.wrong) == (Health.FAILED, Symptom.DEGENERATE, (0, 1, 2))
    assert f"one token {REPEATED} times in a row" in found.reason
    assert judge(reading(dict.fromkeys(range(2), stuck)), None, "x").symptom is Symptom.NONE


def test_soup_is_degenerate() -> None:
    """Best tokens of which the model itself thinks nothing."""
    found = judge(CanaryReading(anew=run(lower=10.0), again=run(lower=10.0)), None, "x")
    assert (found.health, found.symptom) == (Health.FAILED, Symptom.DEGENERATE)
    assert "has best tokens of -10.5 nats on average over all prompts, less than -4" in found.reason


def test_refused_prompts_are_a_symptom() -> None:
    """An error of vLLM's own."""
    refused = Answer(failure=Failure.REFUSED, detail="is refused: HTTP 500")
    found = judged(reading({0: refused}))
    assert (found.health, found.symptom, found.wrong, found.answered) == (Health.FAILED, Symptom.REFUSED, (0,), 5)


@pytest.mark.parametrize(("busy", "health"), [(False, "failed"), (True, "unknown"), (None, "unknown")])
def test_a_late_answer_of_a_busy_server_is_no_fault(busy: bool | None, health: str) -> None:
    """A server that computes other tokens meanwhile is slow; only one that computes nothing is at fault."""
    late = Answer(failure=Failure.TIMED_OUT, seconds=30.0, detail="has had no answer for 30 s")
    found = judged(CanaryReading(anew=(answer(0), late), again=(answer(0),), busy=busy))
    assert found.health == health
    assert found.symptom is (Symptom.NONE if busy is not False else Symptom.TIMED_OUT)
    assert "1 has had no answer for 30 s" in found.reason
    assert found.answered == 1


def test_sound_answers_with_nothing_to_compare_are_unknown() -> None:
    """And the reason says that they were sound, and why there is nothing."""
    found = judge(reading(), None, "none are recorded")
    assert (found.health, found.symptom, found.reference, found.answered) == (Health.UNKNOWN, Symptom.NONE, None, 6)
    assert "compared with nothing: none are recorded." in found.reason


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_digest": "cd"}, "loaded with other weights"),
        ({"model_digest": None}, "no digest of the weights"),
        ({"dtype": "float16"}, "another dtype: bfloat16, not float16"),
        ({"engine": "vllm 0.33.0 eager"}, "another engine"),
        ({"torch_version": "3"}, "another torch version"),
        ({"hardware": "gpu"}, "another hardware"),
        ({"tensor_parallel_size": 2}, "another tensor parallel size: 1, not 2"),
    ],
)
def test_answers_of_another_server_do_not_fit(changed: dict[str, Any], words: str) -> None:
    """Other weights at load, precision, versions, hardware or shards round otherwise."""
    made = expected()
    assert misfit(made, CONDITIONS) is None
    why = misfit(made, CONDITIONS.model_copy(update=changed))
    assert why is not None
    assert words in why


def test_answers_to_other_prompts_do_not_fit() -> None:
    """Those of another version of Flipwatch."""
    other = expected().model_copy(update={"prompts": PROMPTS[:-1]})
    assert "prompts of another version" in str(misfit(other, CONDITIONS))


def test_an_expectation_survives_its_json() -> None:
    """As the store keeps it."""
    made = expected()
    assert Expectation.model_validate_json(made.model_dump_json()) == made
