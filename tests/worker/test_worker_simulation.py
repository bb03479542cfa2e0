"""Random simulations: every request ends with the tokens of an undisturbed run."""

import pytest

from tests.support.worker.worker_simulation import Setting, WorkerSimulation

SETTINGS = {
    "roomy": Setting(pool=5_000),
    "tight": Setting(pool=300),
    "very tight": Setting(pool=120, slots=6),
    "neither": Setting(pool=1_000, slots=8),
    "one slot": Setting(slots=1, pool=200),
    "whole prompts": Setting(chunk=512),
    "tiny chunks": Setting(chunk=7),
    "no prefix cache": Setting(prefix_cache=False),
    "hybrid": Setting(hybrid=True),
    "hybrid, roomy": Setting(hybrid=True, pool=5_000, slots=3),
    "hybrid, tight": Setting(hybrid=True, pool=300, states=4),
    "hybrid, very tight": Setting(hybrid=True, pool=120, states=2, slots=6, chunk=512),
    "hybrid, neither": Setting(hybrid=True, pool=1_000, states=12, slots=8),
    "hybrid, no prefix cache": Setting(hybrid=True, prefix_cache=False),
    "undisturbed": Setting(aborts=0.0, flushes=0.0),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_request_ends_with_its_tokens_and_all_counts_agree(
    setting: Setting, seed: int
) -> None:
    simulation = WorkerSimulation(seed, setting)
    simulation.run(60)
