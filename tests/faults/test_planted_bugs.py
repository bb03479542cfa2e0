"""A harness that never failed proves nothing: each planted bug has to be found by it."""

import pytest

from faults.draw import draw
from faults.planted_bugs import PLANTED
from faults.replay import SimulationError, first_failure, run_seed, shrink
from faults.schedule import Schedule

SEEDS = range(400)
"""Without a bug, all of these runs succeed."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    found = first_failure(SEEDS)
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
