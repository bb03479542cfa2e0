"""Timers of one length."""

from mlx_dp.orchestrator.control.deadlines import Deadlines


def test_timers_expire_in_the_order_of_their_start() -> None:
    deadlines: Deadlines[str] = Deadlines(5.0)
    for now, key in enumerate("abc"):
        deadlines.start(key, float(now))
    assert deadlines.expired(4.9) == []
    assert deadlines.expired(6.0) == ["a", "b"]
    assert deadlines.expired(6.0) == []
    assert "c" in deadlines


def test_a_stopped_timer_never_expires() -> None:
    deadlines: Deadlines[int] = Deadlines(5.0)
    deadlines.start(1, 0.0)
    deadlines.stop(1)
    deadlines.stop(1)
    assert deadlines.expired(99.0) == []
    assert len(deadlines) == 0


def test_starting_anew_gives_the_whole_time_again() -> None:
    deadlines: Deadlines[int] = Deadlines(5.0)
    deadlines.start(1, 0.0)
    deadlines.start(2, 1.0)
    deadlines.start(1, 4.0)
    assert deadlines.expired(6.0) == [2]
    assert deadlines.expired(9.0) == [1]
