"""Time limits of one connection, by a clock that the test moves."""

import pytest

from mlx_dp.orchestrator.http.connection.client_clock import (
    LEAST_TAKEN_NBYTES,
    ClientClock,
    ClientPhase,
    ClientTimeouts,
    Overdue,
)

TIMEOUTS = ClientTimeouts(idle_s=120, head_s=10, body_s=35, send_s=30)


def test_a_client_that_never_sends_is_overdue_with_its_head() -> None:
    clock = ClientClock(100.0)
    assert clock.overdue(TIMEOUTS, 109.9) is None
    assert clock.overdue(TIMEOUTS, 110.0) is Overdue.HEAD


@pytest.mark.parametrize(
    ("phase", "overdue", "limit_s"),
    [
        (ClientPhase.IDLE, Overdue.IDLE, 120),
        (ClientPhase.HEAD, Overdue.HEAD, 10),
        (ClientPhase.BODY, Overdue.BODY, 35),
    ],
)
def test_a_drip_of_bytes_gains_no_time(phase: ClientPhase, overdue: Overdue, limit_s: int) -> None:
    clock = ClientClock(0.0)
    clock.enter(ClientPhase.ANSWER, 1.0)
    for second in range(limit_s):
        clock.enter(phase, 50.0 + second)
        assert clock.overdue(TIMEOUTS, 50.0 + second) is None
    assert clock.overdue(TIMEOUTS, 50.0 + limit_s) is overdue


def test_our_own_turn_may_take_as_long_as_it_does() -> None:
    clock = ClientClock(0.0)
    clock.enter(ClientPhase.ANSWER, 1.0)
    assert clock.overdue(TIMEOUTS, 1e6) is None


def test_each_request_has_its_own_time() -> None:
    clock = ClientClock(0.0)
    for start in (0.0, 1000.0, 2000.0):
        clock.enter(ClientPhase.HEAD, start)
        assert clock.overdue(TIMEOUTS, start + 9) is None
        clock.enter(ClientPhase.ANSWER, start + 9)
        clock.enter(ClientPhase.IDLE, start + 500)


def reads(nbytes_per_s: int, written_nbytes_per_s: int, seconds: int = 100) -> float | None:
    """When a client is overdue that always has unread data."""
    clock = ClientClock(0.0)
    clock.enter(ClientPhase.ANSWER, 0.0)
    for second in range(seconds):
        written = 10**6 + second * written_nbytes_per_s
        unsent = written - second * nbytes_per_s
        clock.unsent(unsent, written_nbytes=written, now=float(second))
        if clock.overdue(TIMEOUTS, float(second)) is Overdue.SENT:
            return float(second)
    return None


def test_a_client_that_takes_next_to_nothing_is_overdue_whatever_is_written() -> None:
    assert reads(0, 0) == reads(1, 0) == reads(1, 1000) == reads(1000, 0) == 30.0


def test_a_slow_reader_has_as_long_as_it_needs_whatever_is_written() -> None:
    rate = LEAST_TAKEN_NBYTES // 29 + 1
    assert reads(rate, 0) is None
    assert reads(rate, rate) is None
    assert reads(rate, 2 * rate) is None


def test_a_client_that_takes_all_there_is_is_not_overdue_however_little_that_is() -> None:
    clock = ClientClock(0.0)
    clock.enter(ClientPhase.ANSWER, 0.0)
    for second in range(100):
        clock.unsent(second % 2, written_nbytes=second, now=float(second))
        assert clock.overdue(TIMEOUTS, float(second)) is None


def test_nothing_unsent_is_never_overdue() -> None:
    clock = ClientClock(0.0)
    clock.enter(ClientPhase.ANSWER, 0.0)
    clock.unsent(10, written_nbytes=10, now=0.0)
    clock.unsent(0, written_nbytes=10, now=1.0)
    assert clock.overdue(TIMEOUTS, 1000.0) is None
