"""Runs schedules by their seeds, and reports a failure with the fewest faults that still fail."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from tests.support.simulated_runs.draw import DRAWS, draw
from tests.support.simulated_runs.simulation import Simulation
from tests.support.simulation.schedule import Drawn, Schedule

Part = TypeVar("Part")
MAX_TRIES = 300


class SimulationError(Exception):
    """An invariant did not hold. The message has the seed and the reduced schedule."""

    def __init__(self, schedule: Schedule, error: Exception) -> None:
        super().__init__(f"{error}\n{schedule}\nreplay: {schedule.replay}")
        self.schedule = schedule
        self.error = error


def failure_of(schedule: Schedule) -> Exception | None:
    """The failure of this run, or None."""
    try:
        Simulation(schedule).run()
    except Exception as error:
        return error
    return None


def run_seed(seed: int, drawn: Drawn = Drawn.ALL) -> Simulation:
    """Raises SimulationError, with a reduced schedule."""
    schedule = DRAWS[drawn](seed)
    try:
        return Simulation(schedule).run()
    except Exception as error:
        shrunk = shrink(schedule)
        raise SimulationError(shrunk, failure_of(shrunk) or error) from error


def first_failure(seeds: Iterable[int], shows: str) -> int | None:
    """The first of these seeds whose run breaks the invariant named by ``shows``.

    Raises any other exception: the planted bug may not do any more what it was meant to do.
    """
    for seed in seeds:
        error = failure_of(draw(seed))
        if error is not None and not isinstance(error, AssertionError):
            raise error
        if error is not None and re.match(rf"{shows}\b", str(error)):
            return seed
    return None


def shrink(schedule: Schedule) -> Schedule:
    """Leave out faults, then requests, for as long as the run still fails."""
    tries = [MAX_TRIES]

    def fails(candidate: Schedule) -> bool:
        tries[0] -= 1
        return tries[0] >= 0 and failure_of(candidate) is not None

    faults = _fewest(schedule.faults, lambda rest: fails(replace(schedule, faults=rest)))
    schedule = replace(schedule, faults=faults)
    arrivals = _fewest(schedule.arrivals, lambda rest: fails(replace(schedule, arrivals=rest)))
    return replace(schedule, arrivals=arrivals)


def _fewest(parts: tuple[Part, ...], fails: Callable[[tuple[Part, ...]], bool]) -> tuple[Part, ...]:
    """A subset with which it still fails, and of which every element is needed."""
    size = len(parts)
    while size:
        start = 0
        while start < len(parts):
            rest = parts[:start] + parts[start + size :]
            if fails(rest):
                parts = rest
            else:
                start += size
        size //= 2
    return parts
