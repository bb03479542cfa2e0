"""How often and how soon a worker may be started again."""

import random

from mlx_dp.orchestrator.restart_budget import BackOff, RestartBudget


class Steady(random.Random):
    """No jitter."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_sixth_restart_within_a_minute_is_refused() -> None:
    budget = RestartBudget(limit=5, window_s=60.0)
    for now in (0.0, 5.0, 10.0, 15.0, 20.0):
        assert budget.allow(now)
        budget.succeeded()
    assert not budget.allow(59.9)
    assert budget.allow(60.0)


def test_starts_that_all_fail_end_however_long_each_of_them_takes() -> None:
    budget = RestartBudget(limit=3, window_s=60.0)
    assert all(budget.allow(now) for now in (0.0, 100.0, 200.0))
    assert not budget.allow(300.0)


def test_success_resets_the_streak() -> None:
    budget = RestartBudget(limit=2, window_s=60.0)
    for now in range(0, 1000, 100):
        assert budget.allow(float(now))
        budget.succeeded()


def test_the_delay_doubles_to_its_limit_and_is_short_again_after_health() -> None:
    back_off = BackOff(first_s=0.25, longest_s=30.0, healthy_s=60.0)
    delays = [back_off.delay(0.0, Steady()) for _ in range(9)]
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert back_off.delay(59.9, Steady()) == 30.0
    assert back_off.delay(60.0, Steady()) == 0.25


def test_a_thousand_failures_do_not_overflow() -> None:
    back_off = BackOff(first_s=0.25, longest_s=30.0, healthy_s=60.0)
    assert [back_off.delay(0.0, Steady()) for _ in range(2000)][-1] == 30.0


def test_jitter_is_at_most_half() -> None:
    rng = random.Random(1)
    delays = [BackOff(1.0, 30.0, 60.0).delay(0.0, rng) for _ in range(200)]
    assert all(0.5 <= delay <= 1.0 for delay in delays)
    assert len(set(delays)) > 100
