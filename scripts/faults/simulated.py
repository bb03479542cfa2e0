"""Rows that cannot be provoked on a real machine: they are simulated, see tests/faults."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[2] / "tests"
SIMULATED: Final = {
    "F21": "duplicate, missing, reordered frames",
    "F25": "the clock jumps",
    "F29": "steps up to 5 times slower; stopped after and within a long prompt",
}
DRAWN: Final = {"F21": "frames", "F25": "sleeps"}


def simulate(name: str, seed: int, runs: int) -> list[str]:
    """Run so many schedules of one row, and say what is wrong, and how to have it again.

    In this process, so that it ends with it.
    """
    print(f"{name} {SIMULATED[name]}, simulated ...", file=sys.stderr, flush=True)
    replay, run = _faults("replay"), _run_of(name)
    found = []
    with _faults("quiet_log").quiet_log():
        for each in range(seed * runs, (seed + 1) * runs):
            try:
                run(each)
            except (replay.SimulationError, AssertionError) as error:
                found.append(f"{name}, seed {each}: {error}")
    return found


def _run_of(name: str) -> Callable[[int], object]:
    if name not in DRAWN:
        run: Callable[[int], object] = _faults("step_allowance").run_seed
        return run
    drawn = _faults("schedule").Drawn(DRAWN[name])
    return lambda seed: _faults("replay").run_seed(seed, drawn)


def _faults(name: str) -> ModuleType:
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return importlib.import_module(f"faults.{name}")
