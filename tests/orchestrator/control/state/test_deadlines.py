"""Timers of one length."""

from typing import Any

from mlx_dp.orchestrator.control.state.deadlines import Deadlines


def due(deadlines: Deadlines[Any], now: float) -> list[Any]:
    """Stop and name every timer that has expired."""
    keys = []
    while (key := deadlines.expired(now)) is not None:
        deadlines.stop(key)
        keys.append(key)
    return keys


def test_timers_expire_in_the_order_of_their_start() -> None:
    deadlines: Deadlines[str] = Deadlines(5.0)
    for now, key in enumerate("abc"):
        deadlines.start(key, float(now))
    assert due(deadlines, 4.9) == []
    assert due(deadlines, 6.0) == ["a", "b"]
    assert due(deadlines, 6.0) == []
    assert "c" in deadlines


def test_a_stopped_timer_never_expires() -> None:
    deadlines: Deadlines[int] = Deadlines(5.0)
    deadlines.start(1, 0.0)
    deadlines.stop(1)
    deadlines.stop(1)
    assert due(deadlines, 99.0) == []
    assert len(deadlines) == 0


def test_starting_anew_gives_the_whole_time_again() -> None:
    deadlines: Deadlines[int] = Deadlines(5.0)
    deadlines.start(1, 0.0)
    deadlines.start(2, 1.0)
    deadlines.start(1, 4.0)
    assert due(deadlines, 6.0) == [2]
    assert due(deadlines, 9.0) == [1]


def test_an_expired_timer_stays_until_it_is_stopped() -> None:
    deadlines: Deadlines[int] = Deadlines(5.0)
    deadlines.start(1, 0.0)
    assert deadlines.expired(5.0) == deadlines.expired(5.0) == 1
    assert 1 in deadlines
