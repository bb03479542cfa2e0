"""Rows that no real machine can be made to show: they are simulated, see tests/faults."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

TESTS: Final = Path(__file__).resolve().parent.parent / "tests"
SIMULATED: Final = {
    "F21": "duplicate, missing, reordered frames",
    "F25": "the clock jumps",
}


def simulate(name: str, seed: int, runs: int) -> list[str]:
    """Run so many schedules of one row, and say what is wrong.

    In this process, so that it ends with it.
    """
    print(f"{name} {SIMULATED[name]}, simulated ...", file=sys.stderr, flush=True)
    draw, replay = _faults("draw"), _faults("replay")
    drawn = {"F21": draw.draw_frames, "F25": draw.draw_sleeps}[name]
    found = []
    with _faults("quiet_log").quiet_log():
        for each in range(seed * runs, (seed + 1) * runs):
            try:
                replay.run_schedule(drawn(each))
            except replay.SimulationError as error:
                found.append(f"{name}, seed {each}: {error}")
    return found


def _faults(name: str) -> ModuleType:
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return importlib.import_module(f"faults.{name}")
