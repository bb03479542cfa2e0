"""Retry-After of a full queue, by a clock of the test."""

import pytest

from mlx_dp.orchestrator.http.stream.queue_pace import (
    LONGEST_RETRY_S,
    REMEMBERED_ENDS,
    QueueLoad,
    QueuePace,
    end_interval_s,
    next_promise_s,
)
from tests.support.control.request_timings import timings

MANY = 10_000
"""Places of a queue whose length bounds nothing."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Served:
    """Slots that are always taken, by requests that take equally long and end in turn."""

    def __init__(self, clock: Clock, *, each_s: float, slots: int = 1, places: int = MANY) -> None:
        self.clock = clock
        self.each_s = each_s
        self.load = QueueLoad(serving=slots, places=places)
        self.pace = QueuePace(clock)
        self.pace.note_idle()

    def end(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.now += self.each_s / self.load.serving
            # The time in the queue is no part of what a request takes.
            self.pace.ended(timings(granted_s=100.0, ended_s=100.0 + self.each_s))

    def told(self) -> int:
        return self.pace.retry_after_s(self.load)


def test_before_anything_has_ended_it_is_a_second() -> None:
    pace = QueuePace(Clock())
    pace.note_idle()
    assert pace.retry_after_s(QueueLoad(serving=1, places=1)) == 1


@pytest.mark.parametrize("ends", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("each_s", "told"), [(0.001, 1), (0.9, 1), (1.0, 1), (1.3, 2), (4.0, 4), (7.5, 8), (200.0, 60)]
)
def test_the_first_is_told_when_the_next_request_ends(each_s: float, told: int, ends: int) -> None:
    served = Served(Clock(), each_s=each_s)
    served.end(ends)
    assert served.told() == told


def test_a_queue_of_one_place_keeps_no_client_away_longer_than_one_request() -> None:
    clock = Clock()
    served = Served(clock, each_s=1.3, places=1)
    for _ in range(20):
        served.end()
        for _ in range(5):
            clock.now += 0.08
            assert served.told() == 2


def test_a_flood_is_spread_over_the_places_that_become_free() -> None:
    served = Served(Clock(), each_s=0.5)
    served.end(40)
    told = [served.told() for _ in range(20)]
    assert told == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10]


def test_a_flood_is_spread_over_one_turn_of_the_queue_and_no_further() -> None:
    served = Served(Clock(), each_s=0.5, places=6)
    served.end(40)
    assert [served.told() for _ in range(10)] == [1, 1, 2, 2, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(("owners", "told"), [(1, 12), (2, 6), (4, 3), (16, 1)])
def test_more_owners_make_room_sooner(owners: int, told: int) -> None:
    served = Served(Clock(), each_s=96.0, slots=8 * owners)
    served.end(2 * REMEMBERED_ENDS)
    assert served.told() == told


def test_a_promise_is_kept_by_time() -> None:
    served = Served(Clock(), each_s=0.5)
    served.end(40)
    for _ in range(20):
        served.told()
    served.end(18)
    assert [served.told() for _ in range(3)] == [2, 2, 3]


def test_a_flood_that_has_gone_is_forgotten_within_a_minute() -> None:
    clock = Clock()
    served = Served(clock, each_s=0.5)
    served.end(40)
    for _ in range(100_000):
        served.told()
    clock.now += LONGEST_RETRY_S
    served.pace.note_idle()
    assert served.told() == 1


def test_time_without_requests_is_no_pace() -> None:
    clock = Clock()
    served = Served(clock, each_s=1.3, places=1)
    for _ in range(5):
        served.end()
        clock.now += 3600.0
        served.pace.note_idle()
        clock.now += 0.5
        assert served.told() == 2


def test_no_client_is_told_more_than_a_minute() -> None:
    served = Served(Clock(), each_s=30.0)
    served.end(40)
    assert [served.told() for _ in range(4)] == [30, 60, 60, 60]
    assert max(served.told() for _ in range(1000)) == LONGEST_RETRY_S


def test_requests_that_take_longer_than_those_before_raise_it() -> None:
    clock = Clock()
    served = Served(clock, each_s=0.01)
    served.end(REMEMBERED_ENDS)
    clock.now += 330.0
    assert served.told() == 11


def test_the_first_requests_of_all_may_be_slow() -> None:
    clock = Clock()
    served = Served(clock, each_s=30.0, slots=2)
    clock.now += 20.0
    assert served.told() == 20
    served.end(2)
    assert served.told() == 15


def test_a_request_that_left_the_queue_says_nothing_of_how_long_requests_take() -> None:
    served = Served(Clock(), each_s=4.0)
    served.end(3)
    for _ in range(40):
        served.pace.ended(timings(granted_s=None, ended_s=0.0))
    assert served.told() == 4


def test_a_change_of_length_is_followed() -> None:
    served = Served(Clock(), each_s=0.1)
    served.end(100)
    served.each_s = 10.0
    served.end(REMEMBERED_ENDS)
    assert served.told() == 10


@pytest.mark.parametrize("serving", [0, 1])
def test_the_interval_is_that_of_one_request_at_a_time_where_none_is_served(serving: int) -> None:
    assert end_interval_s((4.0, 2.0), serving=serving, silence_s=0.0) == 3.0


def test_the_interval_follows_silence_in_proportion_to_what_is_known() -> None:
    known = (1.0,) * 9
    assert end_interval_s(known, serving=1, silence_s=1.0) == 1.0
    assert end_interval_s(known, serving=1, silence_s=91.0) == 10.0
    assert end_interval_s((), serving=1, silence_s=91.0) == 91.0


def test_promises_in_the_past_are_kept() -> None:
    assert next_promise_s(-500.0, interval_s=2.0, places=9) == 2.0
    assert next_promise_s(3.0, interval_s=2.0, places=9) == 5.0
    assert next_promise_s(17.5, interval_s=2.0, places=9) == 18.0
