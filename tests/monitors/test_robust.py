"""Robust z against values computed by hand."""

import pytest

from flipwatch.monitors.robust import MIN_SCORES, RESOLUTION, median_and_mad, robust_z


def test_golden_values() -> None:
    """Median 3, MAD 1, so the outlier 103 is 100 / 1.4826 away."""
    assert median_and_mad([1.0, 2.0, 3.0, 4.0, 103.0]) == (3.0, 1.0)
    assert robust_z([1.0, 2.0, 3.0, 4.0, 103.0]) == pytest.approx(
        [-2 / 1.4826, -1 / 1.4826, 0.0, 1 / 1.4826, 100 / 1.4826]
    )


def test_even_number_of_scores_takes_the_middle_of_two() -> None:
    """Of 0, 1, 3, 10 the median is 2; the deviations 1, 1, 2, 8 have the median 1.5."""
    assert median_and_mad([0.0, 1.0, 3.0, 10.0]) == (2.0, 1.5)


def test_mad_zero_falls_back_to_the_resolution() -> None:
    """When all but one score are equal, that one stands out with a finite z and the others are at 0."""
    assert robust_z([0.0, 0.0, 0.0, 0.0, 3.0]) == pytest.approx([0.0, 0.0, 0.0, 0.0, 3.0 / RESOLUTION])


def test_rounding_noise_does_not_stand_out() -> None:
    """A difference below the resolution has |z| < 1 even when all other scores are equal."""
    z = robust_z([0.0, 0.0, 0.0, 0.0, RESOLUTION / 2])
    assert z[-1] == pytest.approx(0.5)


def test_missing_scores_take_no_part() -> None:
    """None stays None, and the z of the others is as if it were not there."""
    with_gap = robust_z([1.0, None, 2.0, 3.0, 4.0, 103.0])
    assert with_gap[1] is None
    assert [z for z in with_gap if z is not None] == robust_z([1.0, 2.0, 3.0, 4.0, 103.0])


def test_too_few_scores_have_no_z() -> None:
    """Below the minimum there is nothing to compare with, so there is no number either."""
    assert robust_z([1.0] * (MIN_SCORES - 1) + [None]) == [None] * MIN_SCORES
    assert robust_z([]) == []
