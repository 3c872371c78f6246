"""Which recordings fit a model, and which numerics are the same."""

from typing import Any

import pytest

from flipwatch.monitors.differential.facts import DifferentialPlan
from flipwatch.monitors.differential.reference import misfit, same_numerics

from .by_hand import conditions, reading, recording, states


def test_a_recording_of_the_same_model_fits() -> None:
    """Nothing is said against it, with the same weights asked for or not."""
    assert misfit(recording(), conditions(), same_weights=True) is None
    assert misfit(recording(), conditions(), same_weights=False) is None


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"engine": "local"}, {"tensor_parallel_size": 2}])
def test_other_numerics_fit(changes: dict[str, Any]) -> None:
    """Another type, engine or parallel size is allowed for by noise, and no misfit."""
    assert misfit(recording(), conditions(**changes), same_weights=True) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"flipwatch_version": "9.9"},
            "The states were recorded by Flipwatch 0.1.0, and this is 9.9: record them again.",
        ),
        (
            {"architecture": "Other"},
            "The states were recorded on another architecture: ToyForCausalLM, not Other.",
        ),
        ({"num_blocks": 7}, "The states were recorded on another number of blocks: 6, not 7."),
    ],
)
def test_another_model_is_refused(changes: dict[str, Any], why: str) -> None:
    """Another version, architecture or depth is one sentence, whatever the weights."""
    assert misfit(recording(), conditions(**changes), same_weights=False) == why


def test_another_format_is_refused() -> None:
    """A recording in another format is not read."""
    old = recording().model_copy(update={"format": 0})
    assert "record them again" in (misfit(old, conditions(), same_weights=False) or "")


def test_other_weights_are_refused_only_where_they_must_be_the_same() -> None:
    """A model update has other weights on purpose, what this server computed has not."""
    other = conditions(model_digest="4567", model="new")
    assert misfit(recording(), other, same_weights=False) is None
    assert "recorded of toy with other weights than those that new was loaded with" in (
        misfit(recording(), other, same_weights=True) or ""
    )


def test_unknown_weights_are_never_the_same() -> None:
    """Without a digest on either side nothing says whose states these are, not even with none on both."""
    for then, now in ((None, "0123"), ("0123", None), (None, None)):
        why = misfit(recording(model_digest=then), conditions(model_digest=now), same_weights=True)
        assert why is not None
        assert why.startswith("Nothing says whose states these are")


@pytest.mark.parametrize("name", ["dtype", "engine", "torch_version", "hardware", "architecture"])
def test_each_part_of_the_numerics_counts(name: str) -> None:
    """Another type, engine, torch or architecture computes with other kernels."""
    assert not same_numerics(conditions(), conditions(**{name: "other"}))


def test_weights_and_versions_are_no_numerics() -> None:
    """The parallel size is part of them; names, digests and our version are not."""
    assert not same_numerics(conditions(), conditions(tensor_parallel_size=2))
    assert same_numerics(conditions(), conditions(model="b", model_digest=None, flipwatch_version="9"))


def test_a_replay_feeds_what_was_recorded() -> None:
    """The same tokens and sketches, the recorded inputs in their type, and no noise; the model is walked again."""
    fed = states().model_copy(update={"inputs": ["AAAA", "BBBB"]})
    made = recording().model_copy(update={"reading": reading(fed)})
    plan = made.replay()
    assert (plan.tokens, plan.size, plan.seed) == (made.plan.tokens, made.plan.size, made.plan.seed)
    assert (plan.inputs, plan.inputs_dtype, plan.noise) == (["AAAA", "BBBB"], "bfloat16", False)
    assert (plan.walks, plan.records) == (True, False)
    assert DifferentialPlan.model_validate_json(plan.model_dump_json()) == plan
    assert made.plan.inputs is None
