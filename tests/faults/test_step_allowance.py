"""Slow steps are never taken for a hang, and a hang after or within a prompt is found."""

from collections.abc import Callable

import pytest

from tests.support.simulation.step_allowance import RUNS

QUICK = 15
MANY = 150


@pytest.mark.parametrize("run", RUNS)
def test_slow_workers_live_and_stopped_ones_are_lost(run: Callable[[int], None]) -> None:
    for seed in range(QUICK):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, MANY, QUICK))
@pytest.mark.parametrize("run", RUNS)
def test_so_it_is_with_many_seeds(run: Callable[[int], None], first: int) -> None:
    for seed in range(first, first + QUICK):
        run(seed)
