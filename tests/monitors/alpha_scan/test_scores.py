"""Scores, means, standard errors and z against values computed by hand."""

import math

import pytest

from flipwatch.monitors.alpha_scan import AlphaScanReading, paired_t
from flipwatch.monitors.alpha_scan.scores import MIN_SEQUENCES, PROFILE_RESOLUTION, mean, scores, shared_alphas
from flipwatch.monitors.robust import RESOLUTION

from .by_hand import ALPHAS, Curves, gains, healthy, profile_of, reading


def test_mean_is_weighted_by_tokens() -> None:
    """Losses 4 and 2 over 1 and 3 tokens: (1 * 4 + 3 * 2) / 4."""
    assert mean([4.0, 2.0], [1, 3]) == pytest.approx(2.5)


def test_mean_of_nothing_or_of_a_gap_is_none() -> None:
    """No sequences, no losses, or one that is not finite: there is no mean, and no silent number."""
    assert mean([], []) is None
    assert mean([], [1, 3]) is None
    assert mean([4.0, None], [1, 3]) is None


def test_golden_paired_t() -> None:
    """Differences 1, 2, 3, 6: mean 3, squares 14, so the standard error is sqrt(14 * 4 / 3) / 4."""
    found = paired_t([2.0, 4.0, 6.0, 10.0], [1.0, 2.0, 3.0, 4.0], [5, 5, 5, 5])
    assert found == pytest.approx((3.0, 3.0 / (math.sqrt(14 * 4 / 3) / 4)))


def test_golden_paired_t_with_weights() -> None:
    """Differences 4 and 2, weights 1 and 3: mean 2.5; squares 1.5^2 + (3 * 0.5)^2 = 4.5; error sqrt(4.5 * 2) / 4."""
    assert paired_t([5.0, 3.0], [1.0, 1.0], [1, 3]) == pytest.approx((2.5, 2.5 / 0.75))


def test_paired_t_of_equal_weights_is_the_textbook_t() -> None:
    """With equal weights it is the paired t of any textbook: mean / (s / sqrt(N)), s with N - 1."""
    d = [0.3, -0.1, 0.4, 0.2, 0.7]
    m = sum(d) / 5
    s = math.sqrt(sum((x - m) ** 2 for x in d) / 4)
    assert paired_t(d, [0.0] * 5, [7] * 5) == pytest.approx((m, m / (s / math.sqrt(5))))


def test_paired_t_is_signed_and_bounded() -> None:
    """Worse is negative; equal differences have a finite t, in units of the resolution."""
    assert paired_t([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [1, 1, 1]) == pytest.approx((-1.0, -1.0 / RESOLUTION))


def test_paired_t_needs_two_finite_sequences() -> None:
    """One sequence has no standard error; a loss that is not finite takes the test away, not the sequence."""
    assert paired_t([2.0], [1.0], [4]) is None
    assert paired_t([2.0, 3.0, None], [1.0, 1.0, 1.0], [4, 4, 4]) is None
    assert paired_t([2.0, 3.0, 4.0], [1.0, None, 1.0], [4, 4, 4]) is None


def test_golden_scores() -> None:
    """BSS, slope, skip gain and largest deviation of one curve."""
    curves = [[2.5, 2.4, 2.1, 1.9, 1.7], *[healthy(b) for b in range(1, 6)]]
    score = scores(reading(curves))[0]
    assert score.bss == pytest.approx(math.sqrt(0.4**2 + 0.1**2 + 0.1**2 + 0.3**2))
    assert score.slope == pytest.approx((1.9 - 2.1) / 0.2)
    assert score.skip_gain == pytest.approx(-0.5)
    assert score.largest_deviation == pytest.approx(0.4)
    assert [alpha for alpha, _ in score.curve] == ALPHAS
    assert [loss for _, loss in score.curve] == pytest.approx(curves[0])


def test_golden_z() -> None:
    """Skip gains -.1 to -.4 and 3: median -.2, MAD .1, so the faulty block has z 3.2 / .14826."""
    found = scores(reading(gains(-0.1, -0.2, -0.3, -0.4, 3.0)))
    assert found[4].skip_gain_z == pytest.approx(3.2 / 0.14826)
    assert found[0].skip_gain_profile_z is None


def test_skip_gain_t_is_that_of_the_sequences() -> None:
    """The t of a gain is the paired test of its losses, from `MIN_SEQUENCES` on."""
    few, enough = (reading(gains(-0.1, 0.3), sequences=n, spread=0.1) for n in (MIN_SEQUENCES - 2, MIN_SEQUENCES))
    assert [score.skip_gain_t for score in scores(few)] == [None, None]
    assert [score.skip_gain_t for score in scores(enough)] == pytest.approx(
        [-0.1 / (0.2 / math.sqrt(7)), 0.3 / (0.2 / math.sqrt(7))]
    )


def test_losses_are_weighted_by_tokens() -> None:
    """Two sequences with 1 and 3 scored tokens: a skip from (4, 2) to (8, 4) costs (1 * 4 + 3 * 2) / 4."""
    two = AlphaScanReading(
        alphas=[0.0],
        gates=[1.0],
        scored_tokens=[1, 3],
        pass_tokens=6,
        base_nats=[4.0, 2.0],
        nats=[[[8.0, 4.0]]],
        nonfinite_blocks=[],
        passes=1.0,
    )
    assert scores(two)[0].skip_gain == pytest.approx(-2.5)


def test_golden_profile_z() -> None:
    """Gains that moved by 0, .1, -.1, 0, 1 from their healthy values: median 0, MAD .1, whatever those values are."""
    clean = profile_of(reading(gains(-0.1, -2.2, -0.3, -7.4, -0.5)))
    found = scores(reading(gains(-0.1, -2.1, -0.4, -7.4, 0.5)), clean)
    z = [score.skip_gain_profile_z for score in found]
    assert z == pytest.approx([0.0, 0.1 / 0.14826, -0.1 / 0.14826, 0.0, 1.0 / 0.14826], abs=1e-9)
    assert [score.bss_profile_z for score in found] == pytest.approx([0.0] * 5, abs=1e-9)


def test_a_profile_z_is_not_measured_in_rounding() -> None:
    """Where all other blocks are as they were, the scale is the profile's resolution, wider than that of one scan."""
    assert PROFILE_RESOLUTION > RESOLUTION
    clean = profile_of(reading(gains(-0.1, -0.2, -0.3, -0.4, -0.5)))
    found = scores(reading(gains(-0.1, -0.2, -0.3, -0.4, -0.5 + PROFILE_RESOLUTION / 2)), clean)
    assert found[4].skip_gain_profile_z == pytest.approx(0.5)


def test_a_profile_of_another_grid_or_size_gives_no_z() -> None:
    """BSS over other alphas is another number, and so is one over some of the sequences."""
    other_grid = profile_of(reading([[2.1, 2.0, 2.0]] * 5, alphas=[0.0, 0.7, 1.3]))
    more_sequences = profile_of(reading(gains(-0.1, -0.2, -0.3, -0.4, -0.5), sequences=10))
    for profile in (other_grid, more_sequences):
        found = scores(reading(gains(-0.1, -0.2, -0.3, -0.4, -0.5)), profile)
        assert [score.skip_gain_profile_z for score in found] == [None] * 5
        assert found[0].skip_gain_z is not None


def test_golden_without_drift() -> None:
    """Healthy 2.0 and 2.3 without the block; damaged 2.9 and 2.25 without it: 0.05 below the healthy model's."""
    clean = profile_of(reading(gains(-0.3, -0.3)))
    damaged = reading([[2.25, 2.0, 2.0, 2.0, 2.0], [3.3, 2.0, 2.0, 2.0, 2.0]], base=2.9)
    assert [s.without_drift_nats for s in scores(damaged, clean)] == pytest.approx([-0.05, 1.0])
    assert [s.without_drift_nats for s in scores(damaged)] == [None, None]


def test_nonfinite_loss_at_one_alpha_removes_only_its_scores() -> None:
    """An overflow at alpha 1.4 takes BSS and largest deviation of that block; slope and skip gain stay."""
    curves = [healthy(b) for b in range(6)]
    curves[2] = [2.1, 2.02, 2.01, 2.01, None]
    score = scores(reading(curves))[2]
    assert score.bss is None
    assert score.bss_z is None
    assert score.largest_deviation is None
    assert score.slope == pytest.approx(0.0)
    assert score.skip_gain == pytest.approx(-0.1)
    assert score.curve[-1] == (1.4, None)


def test_blocks_are_compared_at_the_alphas_that_they_share() -> None:
    """A block that was measured at more alphas has a longer curve, but its BSS is over those of the others."""
    curves: Curves = [[2.5, 2.4, 2.1], [2.5, 2.4, 2.1], []]
    some = reading(curves, alphas=[0.0, 1.3, 0.7])
    nats = [some.nats[0], [some.nats[1][0], [], some.nats[1][2]], []]
    some = some.model_copy(update={"nats": nats})
    assert shared_alphas(some) == [0.0, 0.7]
    first, second, third = scores(some)
    assert first.bss == second.bss == pytest.approx(0.1)
    assert [alpha for alpha, _ in first.curve] == [0.0, 1.3, 0.7]
    assert [alpha for alpha, _ in second.curve] == [0.0, 0.7]
    assert (third.curve, third.bss) == ((), None)


def test_lopsided_grid_has_no_slope() -> None:
    """Without a pair around 1 there is no slope; 0 and 2 are no pair."""
    score = scores(reading([[2.1, 2.2, 2.3]] * 5, alphas=[0.0, 0.7, 2.0]))[0]
    assert score.slope is None
    assert score.bss == pytest.approx(math.hypot(0.2, 0.3))
