"""What is overdue at one connection, by a clock that the test moves."""

import pytest

from mlx_dp.orchestrator.http.client_clock import ClientClock, ClientPhase, ClientTimeouts, Overdue

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


def test_a_client_that_takes_nothing_is_overdue_and_one_that_takes_a_little_is_not() -> None:
    clock = ClientClock(0.0)
    clock.enter(ClientPhase.ANSWER, 0.0)
    for second in range(100):
        clock.unsent(1000 - second, float(second))
        assert clock.overdue(TIMEOUTS, float(second)) is None
    for second in range(100, 130):
        clock.unsent(900, float(second))
        assert clock.overdue(TIMEOUTS, float(second)) is None
    clock.unsent(900, 130.0)
    assert clock.overdue(TIMEOUTS, 130.0) is Overdue.SENT


def test_nothing_unsent_is_never_overdue() -> None:
    clock = ClientClock(0.0)
    clock.enter(ClientPhase.ANSWER, 0.0)
    clock.unsent(10, 0.0)
    clock.unsent(0, 1.0)
    assert clock.overdue(TIMEOUTS, 1000.0) is None
