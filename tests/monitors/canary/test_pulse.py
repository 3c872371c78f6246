"""The heartbeat: hung, busy, idle, and what cannot be told."""

from typing import Any

import pytest

from flipwatch.monitors.canary.pulse import Counts, Look, Pulse, heartbeat, remember


def look(at: float, tokens: float | None, requests: int = 1, **more: Any) -> Look:
    """One look; without a number of tokens the counters could not be read."""
    counts = None if tokens is None else Counts(running=requests, waiting=0, moving=(tokens,))
    return Look(at, counts, **more)


def seen(*looks: Look) -> tuple[Look, ...]:
    """All that is remembered of them."""
    kept: tuple[Look, ...] = ()
    for one in looks:
        kept = remember(kept, one)
    return kept


def pulse(*looks: Look) -> Pulse:
    """The pulse after these looks, where 10 s are allowed."""
    return heartbeat(seen(*looks), 10.0).pulse


def test_tokens_that_come_are_a_pulse() -> None:
    """However long the queue is."""
    assert pulse(*(look(at, at * 3.0, requests=500) for at in range(0, 100, 5))) is Pulse.MOVING


def test_a_server_without_requests_is_idle() -> None:
    """No counter moves, and none has to."""
    assert pulse(*(look(at, 7.0, requests=0) for at in range(0, 100, 5))) is Pulse.IDLE


def test_requests_and_no_token_for_the_whole_time_are_a_hang() -> None:
    """Not before: up to there it may be one long step."""
    moving = [look(0, 1.0), look(5, 2.0)]
    assert pulse(*moving, look(10, 2.0)) is Pulse.MOVING
    assert pulse(*moving, look(10, 2.0), look(14.9, 2.0)) is Pulse.MOVING
    beat = heartbeat(seen(*moving, look(10, 2.0), look(15, 2.0)), 10.0)
    assert beat.pulse is Pulse.HUNG
    assert beat.reason == "1 requests run and 0 wait, and no counter has moved for 10 s (10 are allowed)."


def test_a_hang_ends_with_the_first_token() -> None:
    """One counter that moves is enough."""
    assert pulse(look(0, 1.0), look(20, 1.0)) is Pulse.HUNG
    assert pulse(look(0, 1.0), look(20, 1.0), look(25, 2.0)) is Pulse.MOVING


def test_the_time_begins_with_the_work() -> None:
    """An idle hour is no hang when a request comes at its end."""
    idle = [look(at, 5.0, requests=0) for at in range(0, 3600, 600)]
    assert pulse(*idle, look(3600, 5.0)) is Pulse.MOVING
    assert pulse(*idle, look(3600, 5.0), look(3610, 5.0)) is Pulse.HUNG


def test_a_question_without_an_answer_is_work() -> None:
    """An engine that hung while it was idle never counts the request that waits for it."""
    idle = look(0, 5.0, requests=0)
    asked = [look(at, 5.0, requests=0, silent_since=4.0) for at in (5, 10, 15)]
    assert pulse(idle, *asked[:2]) is Pulse.MOVING
    beat = heartbeat(seen(idle, *asked), 10.0)
    assert beat.pulse is Pulse.HUNG
    assert "the engine has owed Flipwatch an answer for 11 s" in beat.reason


def test_an_answer_to_one_question_is_a_move_while_another_is_open() -> None:
    """Parts of a scan that hold an idle engine are answered one by one, and a look waits between them."""
    looks = [look(at, 5.0, requests=0, silent_since=at - 1.0) for at in range(5, 60, 5)]
    assert pulse(look(0, 5.0, requests=0), *looks) is Pulse.MOVING


def test_requests_that_are_stuck_in_an_engine_that_answers_are_a_hang() -> None:
    """Its loop goes on, and no token comes."""
    assert pulse(look(0, 5.0), *(look(at, 5.0, silent_since=at - 1.0) for at in (5, 10))) is Pulse.HUNG


def test_who_stands_still_on_purpose_does_not_hang() -> None:
    """Asleep, paused, or being changed: and the time begins anew afterwards."""
    paused = [look(at, 5.0, resting=True) for at in range(0, 60, 5)]
    assert pulse(*paused) is Pulse.UNKNOWN
    assert pulse(*paused, look(60, 5.0), look(65, 5.0)) is Pulse.MOVING
    assert pulse(*paused, look(60, 5.0), look(70, 5.0)) is Pulse.HUNG


def test_nothing_is_told_of_counters_that_cannot_be_read_or_just_began() -> None:
    """No look, none that could be read, and one that has nothing to compare with."""
    assert heartbeat((), 10.0).pulse is Pulse.UNKNOWN
    assert pulse(look(0, 1.0), look(20, None)) is Pulse.UNKNOWN
    assert pulse(look(0, 1.0), look(5, 1.0)) is Pulse.UNKNOWN


def test_a_look_that_failed_hides_no_hang() -> None:
    """The counters stood before and stand after it."""
    assert pulse(look(0, 1.0), look(5, None), look(10, 1.0)) is Pulse.HUNG


@pytest.mark.parametrize("tokens", [1.0, None])
def test_a_long_hang_is_remembered_by_few_looks(tokens: float | None) -> None:
    """A day of looks at a server that stands still takes no more memory than a minute."""
    kept = seen(look(0, 0.5), *(look(at, 1.0) for at in range(5, 20_000, 5)), look(20_000, tokens))
    assert len(kept) <= 4
    assert [one.at for one in kept][:2] == [0, 5]
