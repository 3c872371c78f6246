"""Distances of sketches: golden numbers, equality, values that are not finite, shapes."""

import base64
import math

import pytest

from flipwatch.monitors.differential.divergence import Divergence, Unknown, decode, diverge
from flipwatch.monitors.differential.facts import Sketch

from .by_hand import NAN, SIZE, Right, Rows, moved, sketch


def far(live: Rows, reference: Rows) -> Divergence | Unknown:
    """The divergence of two sketches of one width."""
    return diverge(sketch(live), sketch(reference), SIZE)


def test_rows_come_back() -> None:
    """What was packed is decoded, row by row."""
    assert decode(sketch(Right), SIZE) == list(Right)
    assert decode(sketch(Right), 4) == [(3.0, 4.0, 0.0, 5.0)]


@pytest.mark.parametrize(
    ("text", "why"),
    [("?", "not base64"), (base64.b64encode(bytes(24)).decode(), "24 bytes has no whole rows of 2 numbers")],
)
def test_broken_text_is_refused(text: str, why: str) -> None:
    """What is no base64, or no whole rows, raises one sentence."""
    with pytest.raises(ValueError, match=why):
        decode(Sketch(width=8, rows=text), SIZE)


def test_equal_rows_are_exactly_equal() -> None:
    """Equal sketches lie exactly 0 apart in both measures, a zero row included, where arithmetic would leave a rest."""
    awkward = ((0.1, 0.7), (1e-3, 1 / 3), (0.0, 0.0))
    assert far(awkward, awkward) == Divergence(0.0, 0.0)


def test_golden_numbers() -> None:
    """(4, 3) from (3, 4): sqrt(2) / 5, and 1 - 24 / 25; the row that lies furthest counts."""
    found = far(((4.0, 3.0), (0.0, 5.0)), Right)
    assert isinstance(found, Divergence)
    assert found.l2 == pytest.approx(math.sqrt(2) / 5, rel=1e-12)
    assert found.cosine == pytest.approx(1 / 25, rel=1e-12)
    opposite = far(((3.0, 4.0), (0.0, -5.0)), Right)
    assert opposite == Divergence(2.0, 2.0)


def test_the_two_measures_take_their_own_largest_row() -> None:
    """A row that is only longer leads by distance, another that is only turned by angle."""
    found = far(((30.0, 40.0), (3.0, 4.0)), Right)
    assert isinstance(found, Divergence)
    assert found.l2 == pytest.approx(9.0)
    assert found.cosine == pytest.approx(1 - 4 / 5)


def test_a_cosine_is_never_negative() -> None:
    """Rows of one direction have a cosine of 1, which rounding may exceed."""
    for scale in (1.1, 3.0, 7.0, 1e-5):
        found = far(((0.8 * scale, 0.8 * scale),), ((0.8, 0.8),))
        assert isinstance(found, Divergence)
        assert 0 <= found.cosine < 1e-15


def test_large_values_do_not_overflow() -> None:
    """The squares of 1e200 are not finite, the distance is."""
    found = far(((4e200, 3e200),), ((3e200, 4e200),))
    assert isinstance(found, Divergence)
    assert [found.l2, found.cosine] == pytest.approx([math.sqrt(2) / 5, 1 / 25])


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_not_finite_is_infinitely_far(value: float) -> None:
    """One live row that is not finite where the reference is makes the whole not finite."""
    found = far(((3.0, 4.0), (0.0, value)), Right)
    assert found == Divergence(math.inf, math.inf)
    assert not found.finite


def test_rows_without_a_reference_say_nothing() -> None:
    """Where the reference is not finite the live row is not asked, be it finite or not; the others count."""
    reference = ((NAN, 4.0), (0.0, 5.0))
    assert far(((1.0, 1.0), (0.0, 5.0)), reference) == Divergence(0.0, 0.0, partial=True)
    assert far(((NAN, 4.0), (0.0, 10.0)), reference) == Divergence(1.0, 0.0, partial=True)
    assert far(((NAN, 4.0), (0.0, NAN)), reference) == Divergence(math.inf, math.inf, partial=True)


def test_no_finite_reference_cannot_be_told() -> None:
    """With no row of the reference finite nothing is known, not even of equal bytes."""
    nothing = ((NAN, 1.0), (math.inf, 1.0))
    assert far(nothing, nothing) is Unknown.REFERENCE
    assert far(Right, nothing) is Unknown.REFERENCE
    assert far((), ()) is Unknown.REFERENCE


def test_zero_rows() -> None:
    """From zeros, or next to them, any other row is infinitely far; zeros themselves lie at 1 from any row."""
    assert far(((0.0, 1e-9),), ((0.0, 0.0),)) == Divergence(math.inf, math.inf)
    assert far(((0.0, 0.0),), ((3.0, 4.0),)) == Divergence(1.0, 1.0)
    assert far(((1e200, 0.0),), ((1e-200, 0.0),)) == Divergence(math.inf, math.inf)


def test_another_shape_is_not_compared() -> None:
    """Another width, as another parallel size has, or another number of rows, even where the bytes are equal."""
    assert diverge(sketch(Right, 8), sketch(Right, 4), SIZE) is Unknown.SHAPE
    assert far(Right, Right[:1]) is Unknown.SHAPE


def test_moved_is_what_it_says() -> None:
    """The rows that the other tests are made of lie as far apart as they say."""
    found = far(moved(0.04), Right)
    assert isinstance(found, Divergence)
    assert found.l2 == pytest.approx(0.04)
    assert found.cosine == 0
