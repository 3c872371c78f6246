"""The cap on the time for which the engine is held, on a simulated clock."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as bounded
from hypothesis import strategies as st

from flipwatch.service.duty import WINDOW_SECONDS, Duty


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time of now."""
        return self.now


def _run(duty: Duty, clock: Clock, parts: list[tuple[float, bool]]) -> list[tuple[float, float, bool]]:
    """Parts of (seconds, busy) as early as each may begin: (begin, end, busy)."""
    done = []
    for held, busy in parts:
        clock.now += duty.rest()
        begin, clock.now = clock.now, clock.now + held
        duty.record(held, busy=busy)
        done.append((begin, clock.now, busy))
    return done


def _most_held(done: list[tuple[float, float, bool]]) -> float:
    """The most that was held in any minute: one that is worst ends with a part."""
    most = 0.0
    for _, end, _ in done:
        start = end - WINDOW_SECONDS
        most = max(most, sum(max(0.0, min(e, end) - max(b, start)) for b, e, _ in done))
    return most


@given(
    parts=st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans()), min_size=1, max_size=300),
    busy_share=st.floats(0.005, 0.9),
    idle_share=st.floats(0.005, 0.9),
)
@bounded(max_examples=200, deadline=None)
def test_no_minute_holds_more_than_the_cap_and_one_part(
    parts: list[tuple[float, bool]], busy_share: float, idle_share: float
) -> None:
    """Whatever the parts cost and whenever requests come: of those with requests, and of all."""
    clock = Clock()
    done = _run(Duty(busy_share, idle_share, clock), clock, parts)
    longest = max(end - begin for begin, end, _ in done)
    with_requests = [part for part in done if part[2]]
    assert _most_held(with_requests) <= busy_share * WINDOW_SECONDS + longest + 1e-5
    assert _most_held(done) <= max(busy_share, idle_share) * WINDOW_SECONDS + longest + 1e-5


def test_parts_under_steady_load_are_spread_and_reach_the_cap() -> None:
    """Parts of 50 ms at two percent come every two and a half seconds, and no rarer: a scan goes on."""
    clock = Clock()
    done = _run(Duty(0.02, 0.25, clock), clock, [(0.05, True)] * 200)
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(done)]
    assert gaps == pytest.approx([2.5] * 199)


def test_without_requests_parts_come_more_often() -> None:
    """The idle share counts as long as nobody is served; what was held then is not held against a busy minute."""
    clock = Clock()
    duty = Duty(0.02, 0.25, clock)
    done = _run(duty, clock, [(0.05, False)] * 200)
    assert done[-1][0] - done[0][0] == pytest.approx(199 * 0.2)
    assert duty.rest() == pytest.approx(0.15)


def test_what_did_not_wait_for_its_turn_is_paid_back() -> None:
    """Six seconds held for a mitigation at two percent: the next part waits until they are a minute old."""
    clock = Clock()
    duty = Duty(0.02, 0.02, clock)
    for _ in range(60):
        clock.now += 0.1
        duty.record(0.1, busy=True)
    # All but the last eleven parts must have left the minute.
    assert duty.rest() == pytest.approx(WINDOW_SECONDS - 1.1, abs=0.11)
    clock.now += WINDOW_SECONDS
    assert duty.rest() == 0.0


def test_a_share_of_one_is_no_cap() -> None:
    """Parts follow each other at once."""
    clock = Clock()
    done = _run(Duty(1.0, 1.0, clock), clock, [(1.0, True)] * 200)
    assert done[-1][1] - done[0][0] == pytest.approx(200.0)


def test_the_idle_share_is_never_the_smaller_one() -> None:
    """A server without requests is not spared more than one with them."""
    clock = Clock()
    duty = Duty(0.5, 0.1, clock)
    duty.record(1.0, busy=False)
    assert duty.rest() == pytest.approx(1.0)
