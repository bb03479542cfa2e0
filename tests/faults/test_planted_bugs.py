"""A harness that never failed proves nothing: it must find each planted bug."""

from typing import Final

import pytest

from mlx_dp.orchestrator.control.state.rank_table import RankTable
from tests.support.planted_bugs.table import PLANTED
from tests.support.simulated_runs.draw import draw
from tests.support.simulated_runs.replay import SimulationError, first_failure, run_seed, shrink
from tests.support.simulation.schedule import FaultKind, Schedule

SEEDS = range(400)
"""Without a bug, all of these runs succeed."""
FOUND: Final = {
    "members_of_a_group_survive_each_other": 28,
    "what_cannot_start_is_started_again": 271,
    "nobody_waits_for_accepted": 229,
    "nobody_is_killed": 105,
    "the_old_process_is_not_waited_for": 69,
    "accidents_are_laid_to_requests": 289,
    "the_dead_get_requests": 42,
    "the_dead_are_settled_late": 28,
    "epochs_are_not_compared": 87,
    "the_last_token_is_sent_again": 65,
    "our_own_sleep_is_held_against_others": 51,
}
"""The seeds at which rare bugs were last found: those run first, since a search takes long."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    planted.plant(monkeypatch)
    known = FOUND.get(name, 0)
    seeds = (known, *(seed for seed in SEEDS if seed != known))
    found = first_failure(seeds, planted.shows)
    assert found is not None, f"{len(SEEDS)} runs did not show it as {planted.shows}"


def test_a_patch_that_only_crashes_is_not_taken_for_a_bug_that_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RankTable, "remove", lambda: ())
    with pytest.raises(TypeError):
        first_failure(SEEDS, "I2")


def test_a_failure_names_its_seed_and_only_the_faults_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    PLANTED["hangs_are_not_seen"].plant(monkeypatch)
    seed = first_failure(SEEDS, "I9")
    assert seed is not None
    with pytest.raises(SimulationError, match=f"--draw all --seed {seed}") as raised:
        run_seed(seed)
    shrunk: Schedule = raised.value.schedule
    assert 0 < len(shrunk.faults) < len(draw(seed).faults)
    assert FaultKind.HANG in {fault.kind for fault in shrunk.faults}
    assert shrink(shrunk) == shrunk
