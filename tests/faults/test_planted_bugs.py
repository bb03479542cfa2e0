"""A harness that never failed proves nothing: each planted bug has to be found by it."""

from typing import Final

import pytest

from faults.draw import draw
from faults.planted_bugs import PLANTED
from faults.replay import SimulationError, first_failure, run_seed, shrink
from faults.schedule import Schedule

SEEDS = range(400)
"""Without a bug, all of these runs succeed."""
FOUND: Final = {
    "what_cannot_start_is_started_again": 271,
    "nobody_waits_for_accepted": 229,
    "nobody_is_killed": 136,
    "epochs_are_not_compared": 87,
    "the_old_process_is_not_waited_for": 69,
    "the_last_token_is_sent_again": 65,
    "our_own_sleep_is_held_against_others": 51,
}
"""Where those were seen last that are rare: that run goes first, since all of them take long."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    known = FOUND.get(name, 0)
    found = first_failure((known, *(seed for seed in SEEDS if seed != known)))
    assert found is not None, f"{len(SEEDS)} runs did not show it"


def test_a_failure_names_its_seed_and_only_the_faults_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    PLANTED["hangs_are_not_seen"](monkeypatch)
    seed = first_failure(SEEDS)
    assert seed is not None
    with pytest.raises(SimulationError, match=f"--seed {seed}") as raised:
        run_seed(seed)
    shrunk: Schedule = raised.value.schedule
    assert len(shrunk.faults) == 1 <= len(draw(seed).faults)
    assert shrink(shrunk) == shrunk
