"""Every response is exact, and nothing is left, under any fault of workers, wire and clients.

A run that fails reports the command that repeats it.
"""

from dataclasses import replace

import pytest

from tests.support.simulated_runs.draw import DRAWS, draw
from tests.support.simulated_runs.replay import run_seed
from tests.support.simulated_runs.simulation import Simulation
from tests.support.simulation.schedule import Drawn, Fault, FaultKind, Schedule

RUNS = 20
QUICK = 6
"""Groups of runs in CI; the whole run has ``MANY``."""
MANY = 200
QUICK_FRAMES = 60


def _seeds(quick: int, many: int, step: int = 1) -> list[object]:
    """Seeds up to ``many``. Those from ``quick`` on are slow."""
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, many, step)]
    return [*range(0, quick, step), *slow]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run_of_seeds" not in metafunc.fixturenames:
        return
    seed = metafunc.config.getoption("--seed", None)
    if seed is not None:
        metafunc.parametrize("run_of_seeds", [range(seed, seed + 1)], ids=[str(seed)])
        return
    runs = [range(first, first + RUNS) for first in range(0, QUICK * RUNS, RUNS)]
    slow = [range(first, first + RUNS) for first in range(QUICK * RUNS, MANY * RUNS, RUNS)]
    cases = [pytest.param(seeds, id=f"{seeds[0]}-{seeds[-1]}") for seeds in runs]
    cases += [
        pytest.param(seeds, id=f"{seeds[0]}-{seeds[-1]}", marks=pytest.mark.slow) for seeds in slow
    ]
    metafunc.parametrize("run_of_seeds", cases)


def test_every_invariant_holds_in_every_run(run_of_seeds: range, drawn: Drawn) -> None:
    for seed in run_of_seeds:
        run_seed(seed, drawn)


def undisturbed(seed: int) -> Schedule:
    """The run of this seed without faults, and without requests that are faults."""
    schedule = draw(seed)
    arrivals = tuple(each for each in schedule.arrivals if not (each.poison or each.unservable))
    return replace(schedule, faults=(), arrivals=arrivals)


@pytest.mark.parametrize("seed", range(10))
def test_without_faults_every_request_ends_well_and_no_worker_dies(seed: int) -> None:
    counters = Simulation(undisturbed(seed)).run().core.counters
    assert counters.requests_error == counters.worker_deaths == counters.protocol_errors == 0
    assert counters.requests_ok > 0


@pytest.mark.parametrize("seed", _seeds(15, 30))
def test_clock_jumps_kill_no_worker(seed: int) -> None:
    counters = run_seed(seed, Drawn.SLEEPS).core.counters
    assert counters.requests_error == counters.worker_deaths == 0


@pytest.mark.parametrize("first", _seeds(QUICK_FRAMES, 100, RUNS))
def test_every_invariant_holds_under_any_fault_of_frames(first: int) -> None:
    for seed in range(first, first + RUNS):
        run_seed(seed, Drawn.FRAMES)


@pytest.mark.parametrize("seed", _seeds(10, 20))
def test_a_rolling_restart_fails_no_request_and_turns_none_away(seed: int) -> None:
    schedule = undisturbed(seed)
    # Right before a burst of requests: with a single worker, some arrive while none serves.
    times = (schedule.arrivals[0].at - 0.05, schedule.arrivals[-1].at - 0.4)
    restarts = tuple(Fault(at=at, kind=FaultKind.RESTART, nth=2) for at in times)
    setting = replace(schedule.setting, max_queued=100)
    simulation = Simulation(replace(schedule, setting=setting, faults=restarts)).run()
    counters = simulation.core.counters
    assert counters.requests_error == counters.worker_deaths == 0
    assert counters.requests_refused.keys() <= {"invalid"}
    assert counters.worker_restarts >= len(simulation.core.supervisor.workers)


@pytest.mark.parametrize("tag", ["accepted", "prefilled", "tokens", "finished"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nth", [1, 4])
def test_a_death_at_any_message_costs_no_token(tag: str, after: bool, nth: int) -> None:
    for seed in range(5):
        schedule = undisturbed(seed)
        setting = replace(schedule.setting, max_restarts=100, max_attempts=100)
        death = Fault(at=0.0, kind=FaultKind.DIE_SAYING, tag=tag, nth=nth, after=after)
        counters = (
            Simulation(replace(schedule, setting=setting, faults=(death,))).run().core.counters
        )
        assert counters.requests_error == 0


def test_the_same_seed_gives_the_same_run() -> None:
    def trace(seed: int) -> tuple[object, ...]:
        simulation = run_seed(seed)
        return simulation.core.counters, simulation.events

    assert [trace(seed) for seed in range(10)] == [trace(seed) for seed in range(10)]


@pytest.mark.parametrize("drawn", Drawn)
def test_the_printed_command_draws_a_failed_run_again(drawn: Drawn) -> None:
    schedule = DRAWS[drawn](7)
    words = schedule.replay.split()
    told = words[words.index("--draw") + 1]
    assert DRAWS[Drawn(told)](int(words[words.index("--seed") + 1])) == schedule
