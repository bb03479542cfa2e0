"""Whoever finds the queue full is told when there will be room, by a clock that the test moves."""

import pytest
from request_timings import timings

from mlx_dp.orchestrator.http.queue_pace import LONGEST_RETRY_S, QueuePace


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def paced(clock: Clock, interval_s: float, ends: int = 40) -> QueuePace:
    pace = QueuePace(clock)
    for _ in range(ends):
        clock.now += interval_s
        pace.ended(timings())
    return pace


def test_without_experience_it_is_a_second() -> None:
    pace = QueuePace(Clock())
    assert {pace.retry_after_s() for _ in range(100)} == {1}


@pytest.mark.parametrize(("interval_s", "told"), [(0.001, 1), (0.9, 1), (4.0, 4), (7.5, 8)])
def test_the_first_is_told_when_the_next_request_ends(interval_s: float, told: int) -> None:
    clock = Clock()
    assert paced(clock, interval_s).retry_after_s() == told


def test_a_flood_is_spread_over_the_places_that_become_free() -> None:
    clock = Clock()
    pace = paced(clock, 0.5)
    told = [pace.retry_after_s() for _ in range(20)]
    assert told == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10]


def test_a_promise_is_kept_by_the_end_of_a_request() -> None:
    clock = Clock()
    pace = paced(clock, 0.5)
    for _ in range(20):
        pace.retry_after_s()
    for _ in range(18):
        clock.now += 0.5
        pace.ended(timings())
    assert [pace.retry_after_s() for _ in range(3)] == [2, 2, 3]


def test_a_flood_that_has_gone_is_forgotten_within_a_minute_of_ends() -> None:
    clock = Clock()
    pace = paced(clock, 0.5)
    for _ in range(100_000):
        pace.retry_after_s()
    for _ in range(120):
        clock.now += 0.5
        pace.ended(timings())
    assert pace.retry_after_s() == 1


def test_nobody_is_told_more_than_a_minute() -> None:
    clock = Clock()
    pace = paced(clock, 30.0)
    assert [pace.retry_after_s() for _ in range(4)] == [30, 60, 60, 60]
    assert max(pace.retry_after_s() for _ in range(10_000)) == LONGEST_RETRY_S


def test_ends_that_do_not_come_any_more_are_no_pace() -> None:
    clock = Clock()
    pace = paced(clock, 0.01, ends=32)
    clock.now += 320.0
    assert pace.retry_after_s() == 10
