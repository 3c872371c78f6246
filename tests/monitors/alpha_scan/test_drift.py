"""The judgement with a clean profile: drift of the loss, and harm above what is healthy."""

import pytest

from flipwatch.monitors.alpha_scan import Thresholds
from flipwatch.monitors.alpha_scan.judgement import judge
from flipwatch.monitors.finding import Action, Health

from .by_hand import Curves, gains, healthy, profile_of, reading

DEFAULTS = Thresholds()


def test_drift_from_the_profile_fails_without_a_block() -> None:
    """Damage that no skip undoes: the health fails, no block is named, and the sentence says what it rests on."""
    clean = profile_of(reading([healthy(b) for b in range(6)]))
    worse: Curves = [[2.6 + 0.01 * b, 2.5, 2.5, 2.5, 2.5] for b in range(6)]
    finding = judge([reading(worse, base=2.5)], DEFAULTS, clean)
    assert (finding.health, finding.flagged, finding.action) == (Health.FAILED, (), Action.INVESTIGATE)
    assert finding.drift_nats == pytest.approx(0.5)
    assert finding.profile_recorded_at == clean.recorded_at
    assert "no block is flagged of 6: a skip would not help" in finding.reason
    assert "against the clean profile the loss is +0.500 nats (t 5000.0)" in finding.reason
    assert "no clean profile" not in finding.reason
    assert judge([reading(worse, base=2.5)], DEFAULTS).health is Health.OK


def test_drift_needs_its_threshold_and_no_test() -> None:
    """Too few nats are no alarm, nor is a lower loss; the sequences are the same, so a wide spread excuses nothing."""
    curves = [healthy(b) for b in range(6)]
    clean = profile_of(reading(curves))
    assert judge([reading(curves, base=2.04)], DEFAULTS, clean).health is Health.OK
    wide = judge([reading(curves, base=2.1, spread=0.2)], DEFAULTS, clean)
    assert wide.drift_nats == pytest.approx(0.1)
    assert wide.drift_t == pytest.approx(0.1 / (0.19 / 7**0.5))
    assert wide.health is Health.FAILED
    assert judge([reading(curves, base=1.5)], Thresholds(min_gain_nats=9.0), clean).health is Health.OK


def test_one_sequence_shows_drift_as_well() -> None:
    """Its drift has no standard error, and needs none."""
    curves = [healthy(b) for b in range(6)]
    clean = profile_of(reading(curves, sequences=1))
    worse: Curves = [[2.6 + 0.01 * b, 2.5, 2.5, 2.5, 2.5] for b in range(6)]
    finding = judge([reading(worse, base=2.5, sequences=1)], DEFAULTS, clean)
    assert (finding.health, finding.drift_nats, finding.drift_t) == (Health.FAILED, pytest.approx(0.5), None)
    assert "against the clean profile the loss is +0.500 nats (t unknown)" in finding.reason


def test_drift_is_not_judged_under_gates() -> None:
    """A mitigated model is meant to differ from its healthy self; the numbers are there all the same."""
    clean = profile_of(reading([healthy(b) for b in range(6)]))
    curves: Curves = [[2.6 + 0.01 * b, 2.5, 2.5, 2.5, 2.5] for b in range(5)]
    finding = judge([reading([*curves, []], base=2.5, gates=[1.0] * 5 + [0.0])], DEFAULTS, clean)
    assert (finding.health, finding.drift_nats) == (Health.DEGRADED, pytest.approx(0.5))


def test_a_profile_of_fewer_sequences_gives_no_drift() -> None:
    """What cannot be compared is said, not guessed."""
    clean = profile_of(reading([healthy(b) for b in range(6)], sequences=4))
    finding = judge([reading([healthy(b) for b in range(6)])], DEFAULTS, clean)
    assert finding.drift_nats is None
    assert finding.reason.endswith("; the loss could not be compared with the clean profile")


def test_a_gain_that_the_healthy_block_has_too_is_no_harm() -> None:
    """With a profile, harm is a gain above its healthy value; the most harm is flagged, not the largest gain."""
    clean = profile_of(reading(gains(-0.1, -0.2, 0.6, -0.4, -0.5)))
    same = reading(gains(-0.1, -0.2, 0.6, -0.4, -0.5))
    assert judge([same], DEFAULTS).flagged == (2,)
    assert judge([same], DEFAULTS, clean).flagged == ()
    both = reading(gains(-0.1, -0.2, 0.8, -0.4, 0.4))
    assert judge([both], DEFAULTS).flagged == (2,)
    assert judge([both], DEFAULTS, clean).flagged == (4,)
    assert judge([reading(gains(-0.1, -0.2, 0.6, -0.4, 0.04))], DEFAULTS, clean).flagged == ()


def test_the_one_block_that_explains_the_drift_is_named() -> None:
    """Without it the model is the healthy one without it: named, but no skip is suggested, since it costs more."""
    clean = profile_of(reading(gains(-0.1, -0.2, -2.0, -0.4, -0.5)))
    damaged = [[3.1, 3.0, 3.0, 3.0, 3.0], [3.2, 3.0, 3.0, 3.0, 3.0], [4.0, 3.0, 3.0, 3.0, 3.0]]
    others = [[3.4, 3.0, 3.0, 3.0, 3.0], [3.5, 3.0, 3.0, 3.0, 3.0]]
    curves: Curves = [*damaged, *others]
    finding = judge([reading(curves, base=3.0)], DEFAULTS, clean)
    assert (finding.health, finding.flagged, finding.action) == (Health.FAILED, (2,), Action.INVESTIGATE)
    assert "block 2: without it, and without no other, the loss is that of the healthy model" in finding.reason
    assert finding.blocks[2].flagged
    assert finding.predicted_loss_nats == pytest.approx(4.0)


def test_where_two_blocks_explain_the_drift_none_is_named() -> None:
    """Or no block: the cause is elsewhere."""
    clean = profile_of(reading(gains(-0.1, -2.0, -2.0, -0.4, -0.5)))
    two: Curves = [[3.1] * 5, [4.0] * 5, [4.0] * 5, [3.4] * 5, [3.5] * 5]
    none: Curves = [[3.1] * 5, [5.0] * 5, [5.0] * 5, [3.4] * 5, [3.5] * 5]
    for curves in (two, none):
        finding = judge([reading(curves, base=3.0)], DEFAULTS, clean)
        assert (finding.health, finding.flagged, finding.action) == (Health.FAILED, (), Action.INVESTIGATE)


def test_a_skip_that_leaves_most_of_the_damage_is_not_suggested() -> None:
    """Damage outside the blocks makes a healthy block look harmful; the profile knows that more is wrong."""
    clean = profile_of(reading(gains(-0.1, -0.2, -0.3, -0.4, -0.5)))
    curves: Curves = [[5.0 + extra] * 5 for extra in (0.2, 0.3, -1.0, 0.4, 0.5)]
    finding = judge([reading(curves, base=5.0)], DEFAULTS, clean)
    assert (finding.flagged, finding.action) == ((2,), Action.INVESTIGATE)
    assert "1.700 nats of that stay without it" in finding.reason
    assert judge([reading(curves, base=5.0)], DEFAULTS).action is Action.SKIP
    healed: Curves = [[5.0 + extra] * 5 for extra in (0.2, 0.3, -2.7, 0.4, 0.5)]
    assert judge([reading(healed, base=5.0)], DEFAULTS, clean).action is Action.SKIP
