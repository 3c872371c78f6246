"""Clean profiles: what makes one, what refuses one, how large it is."""

import math

import pytest

from flipwatch.monitors.alpha_scan import (
    Profile,
    Provenance,
    Strategy,
    UnusableReading,
    difference,
    digest_of,
    make_profile,
)
from flipwatch.monitors.alpha_scan.reading import rounds
from flipwatch.monitors.alpha_scan.scores import scores

from .by_hand import ALPHAS, PROVENANCE, Curves, gains, healthy, profile_of, reading
from .random_model import changed, plan
from .toy_model import ToyModel, scanned, toy_plan

CURVES = [healthy(b) for b in range(6)]


def test_a_profile_holds_what_was_measured() -> None:
    """Scores of each block, loss of each sequence, and the alphas that the scores are over."""
    clean = reading(CURVES)
    profile = make_profile(clean, PROVENANCE, 1_800_000_000.5)
    assert (profile.alphas, profile.base_nats) == (ALPHAS, clean.base_nats)
    assert [block.skip_gain for block in profile.blocks] == [score.skip_gain for score in scores(clean)]
    assert [block.bss for block in profile.blocks] == [score.bss for score in scores(clean)]
    assert (profile.provenance, profile.recorded_at) == (PROVENANCE, 1_800_000_000.5)


@pytest.mark.parametrize("strategy", [Strategy.PLAIN, Strategy.TWO_STAGE, Strategy.GROWING])
def test_a_profile_fits_the_next_scan_of_the_same_strategy(strategy: Strategy) -> None:
    """Recorded from a scan and used for the same one again: all differences are 0, and there is a z for each block."""
    readings = scanned(ToyModel(), strategy=strategy).readings
    profile = make_profile(rounds(readings)[0], PROVENANCE, 0.0)
    again = scores(rounds(readings)[0], profile)
    assert [score.bss_profile_z for score in again] == [0.0] * 12
    assert [score.skip_gain_profile_z for score in again] == [0.0] * 12


@pytest.mark.parametrize(
    "gates", [[1.0, 0.0, 1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 1.0, 1.0, 1.0, 1.0]], ids=["skipped", "damped"]
)
def test_a_mitigated_model_makes_no_profile(gates: list[float]) -> None:
    """A profile must show the whole model: no gate is closed."""
    with pytest.raises(UnusableReading, match="undo that"):
        profile_of(reading(CURVES, gates=gates))


def test_a_round_without_a_block_makes_no_profile() -> None:
    """The same for a block that only the scan left out."""
    with pytest.raises(UnusableReading, match="mitigated"):
        profile_of(reading([[], *CURVES[1:]], left_out=[0]))


def test_a_broken_model_makes_no_profile() -> None:
    """A loss that is not finite, a block that is not, or one that explodes."""
    for broken in (
        reading(CURVES, base=None),
        reading(CURVES, nonfinite=[2]),
        reading(CURVES, exploding=[2]),
        reading([[]], alphas=[], sequences=0),
    ):
        with pytest.raises(UnusableReading, match="no clean model"):
            profile_of(broken)


def test_a_partial_reading_makes_no_profile() -> None:
    """Every block must have been left out once: that is what a scan with a profile compares."""
    no_skip: Curves = [[2.1, 2.1]] * 6
    lossy: Curves = [[None, 2.0, 2.0, 2.0, 2.0], *CURVES[1:]]
    for partial in (reading([[], *CURVES[1:]]), reading(no_skip, alphas=[0.7, 1.3]), reading(lossy)):
        with pytest.raises(UnusableReading, match="Some block was not measured"):
            profile_of(partial)


def test_the_same_conditions_differ_in_nothing() -> None:
    """Nor does another name of the same model matter."""
    assert difference(PROVENANCE, PROVENANCE) is None
    assert difference(PROVENANCE, PROVENANCE.model_copy(update={"model": "renamed"})) is None


@pytest.mark.parametrize("name", [name for name in Provenance.model_fields if name != "model"])
def test_each_other_condition_refuses_the_profile(name: str) -> None:
    """The sentence names it, with both values."""
    other = PROVENANCE.model_copy(update={name: 2 if name.endswith("size") else "other"})
    sentence = difference(PROVENANCE, other)
    assert sentence is not None
    assert f"{name} {getattr(PROVENANCE, name)} there, {getattr(other, name)} here" in sentence
    assert sentence.count(";") == 0


def test_all_differences_are_named() -> None:
    """Not the first alone."""
    sentence = difference(PROVENANCE, PROVENANCE.model_copy(update={"dtype": "bfloat16", "model_digest": "89"}))
    assert sentence is not None
    assert "model_digest 0123 there, 89 here; dtype float32 there, bfloat16 here" in sentence


def test_the_digest_tells_validation_sets_apart() -> None:
    """Other tokens or other scored positions are another set; the grid is no part of it."""
    order = plan()
    assert digest_of(order) == digest_of(changed(order, alphas=[0.0], tokens_per_step=1))
    assert digest_of(order) != digest_of(changed(order, scored_from=[1, 3, 1, 1, 4]))
    assert digest_of(order) != digest_of(changed(order, tokens=[*order.tokens[:-1], [1, 2, 3, 4, 5]]))
    assert digest_of(toy_plan(2)) != digest_of(toy_plan(3))


def test_a_profile_survives_json() -> None:
    """Exported and imported it is the same."""
    profile = profile_of(reading(CURVES))
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": 0},
        {"base_nats": [math.nan]},
        {"base_nats": [1e200]},
        {"blocks": [{"bss": -1e200, "slope": None, "skip_gain": 0.0, "largest_deviation": None}]},
        {"recorded_at": math.inf},
        {"made_by": "somebody else"},
        {"blocks": [{"bss": 1.0}]},
    ],
    ids=str,
)
def test_a_foreign_format_is_refused(change: dict[str, object]) -> None:
    """A later format, numbers that are none or that no loss can be, fields that are not known or missing."""
    with pytest.raises(ValueError, match=next(iter(change))):
        Profile.model_validate(profile_of(reading(CURVES)).model_dump() | change)


def test_a_profile_is_small() -> None:
    """30 blocks and 64 sequences with numbers of full length, as JSON: below 10 kB."""
    curves = gains(*(-0.1 - block / 7 for block in range(30)))
    clean = reading([[None if loss is None else loss + 1 / 3 for loss in curve] for curve in curves], sequences=64)
    clean = clean.model_copy(update={"base_nats": [2 + n / 7 for n in range(64)]})
    assert 1_000 < len(profile_of(clean).model_dump_json().encode()) < 10_000
