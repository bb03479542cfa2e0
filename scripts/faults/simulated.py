"""Rows that cannot be provoked on a real machine: the simulation in tests/faults runs them."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Final

SIMULATED: Final = {
    "F21": "duplicate, missing, reordered frames",
    "F25": "the clock jumps",
    "F29": "steps up to 5 times slower; stopped after and within a long prompt",
}
DRAWN: Final = {"F21": "frames", "F25": "sleeps"}


def simulate(name: str, seed: int, runs: int) -> list[str]:
    """Simulate this many schedules of one row; report each violation with its seed.

    Runs in this process, so that it ends with it.
    """
    # The simulation imports the whole product, which the other rows do not need.
    from tests.support.simulated_runs.quiet_log import quiet_log
    from tests.support.simulated_runs.replay import SimulationError

    print(f"{name} {SIMULATED[name]}, simulated ...", file=sys.stderr, flush=True)
    run = _run_of(name)
    found = []
    with quiet_log():
        for each in range(seed * runs, (seed + 1) * runs):
            try:
                run(each)
            except (SimulationError, AssertionError) as error:
                found.append(f"{name}, seed {each}: {error}")
    return found


def _run_of(name: str) -> Callable[[int], object]:
    from tests.support.simulated_runs.replay import run_seed
    from tests.support.simulation import step_allowance
    from tests.support.simulation.schedule import Drawn

    if name not in DRAWN:
        return step_allowance.run_seed
    return partial(run_seed, drawn=Drawn(DRAWN[name]))
