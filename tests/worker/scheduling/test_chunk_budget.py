"""The budget against a simulated device, whose seconds are added up and never slept."""

from dataclasses import dataclass

import pytest

from mlx_dp.worker.scheduling.chunk_budget import (
    FIRST_CHUNK_TOKENS,
    LONGEST_CHUNK_S,
    MAX_SLOWDOWN,
    MIN_CHUNK_TOKENS,
    ChunkBudget,
)


@dataclass
class Device:
    """A step takes the seconds of its decode and of its prompt tokens.

    ``pass_s`` is the time of a pass with any number of prompt tokens.
    """

    decode_s: float
    token_s: float
    pass_s: float = 0.0

    def run(self, budget: ChunkBudget, *, decoding: int, prompt: int, waiting: int = 1) -> float:
        """Run one step with up to ``prompt`` tokens to prefill, and return its seconds."""
        chunk = min(prompt, budget.tokens(decoding=decoding, waiting=waiting)) if prompt else 0
        pass_s = self.pass_s if chunk else 0.0
        duration_s = (self.decode_s if decoding else pass_s) + chunk * self.token_s
        budget.observe(duration_s, prefilled=chunk, decoded=decoding)
        return duration_s


CPU = Device(decode_s=0.110, token_s=0.004)
GPU = Device(decode_s=0.020, token_s=0.0001)


def test_with_nothing_decoding_a_step_takes_all() -> None:
    budget = ChunkBudget(512)
    assert budget.tokens(decoding=0, waiting=1) == 512
    CPU.run(budget, decoding=0, prompt=512)
    CPU.run(budget, decoding=8, prompt=0)
    assert budget.tokens(decoding=0, waiting=1) == 512


def test_the_first_chunk_is_small_since_its_time_is_unknown() -> None:
    budget = ChunkBudget(4096)
    assert budget.tokens(decoding=0, waiting=1) == FIRST_CHUNK_TOKENS
    CPU.run(budget, decoding=0, prompt=4096)
    assert budget.tokens(decoding=0, waiting=1) == 4096


def test_a_chunk_takes_seconds_and_not_minutes_however_large_it_may_be() -> None:
    slow = Device(decode_s=1.0, token_s=0.1)
    budget = ChunkBudget(4096)
    slow.run(budget, decoding=0, prompt=4096)
    assert slow.run(budget, decoding=0, prompt=4096) == pytest.approx(LONGEST_CHUNK_S)
    frozen = Device(decode_s=100.0, token_s=10.0)
    for _ in range(20):
        frozen.run(budget, decoding=0, prompt=4096)
    assert budget.tokens(decoding=0, waiting=1) == MIN_CHUNK_TOKENS


def test_before_anything_is_known_a_mixed_step_takes_the_least() -> None:
    assert ChunkBudget(512).tokens(decoding=1, waiting=1) == MIN_CHUNK_TOKENS


def test_a_fast_device_converges_to_the_slowdown() -> None:
    budget = ChunkBudget(512)
    for _ in range(5):
        GPU.run(budget, decoding=8, prompt=0)
    steps = [GPU.run(budget, decoding=8, prompt=10_000) for _ in range(10)]
    assert steps[-1] == pytest.approx(1.5 * GPU.decode_s, rel=0.02)
    assert max(steps) <= 1.55 * GPU.decode_s


def test_a_slow_device_gets_the_least_chunk_and_never_less() -> None:
    budget = ChunkBudget(512)
    CPU.run(budget, decoding=0, prompt=512)
    for _ in range(20):
        CPU.run(budget, decoding=8, prompt=0)
        CPU.run(budget, decoding=8, prompt=1_500)
    assert budget.tokens(decoding=8, waiting=1) == MIN_CHUNK_TOKENS


def test_the_speed_of_a_decode_is_found_although_every_step_is_mixed() -> None:
    budget = ChunkBudget(512)
    GPU.run(budget, decoding=0, prompt=512)
    for _ in range(5):
        GPU.run(budget, decoding=8, prompt=10_000)
    assert budget.tokens(decoding=8, waiting=1) == pytest.approx(100, abs=2)


@pytest.mark.parametrize("decoding", [0, 8])
def test_short_prompts_teach_nothing_of_a_token(decoding: int) -> None:
    device = Device(decode_s=0.020, token_s=0.0001, pass_s=0.040)
    budget = ChunkBudget(512)
    for _ in range(5):
        device.run(budget, decoding=8, prompt=0)
        device.run(budget, decoding=0, prompt=3)
    if decoding:
        # A stalled step, and its three tokens, which did not cause the stall.
        budget.observe(2.0, prefilled=3, decoded=decoding)
    for _ in range(2):
        device.run(budget, decoding=8, prompt=10_000)
    assert budget.tokens(decoding=8, waiting=1) == pytest.approx(100, abs=2)


def test_a_device_that_slows_down_is_followed() -> None:
    budget = ChunkBudget(512)
    for _ in range(10):
        GPU.run(budget, decoding=8, prompt=0)
        GPU.run(budget, decoding=8, prompt=10_000)
    assert budget.tokens(decoding=8, waiting=1) == pytest.approx(100, abs=2)
    hot = Device(decode_s=0.020, token_s=0.0002)
    for _ in range(15):
        hot.run(budget, decoding=8, prompt=0)
        hot.run(budget, decoding=8, prompt=10_000)
    assert budget.tokens(decoding=8, waiting=1) == pytest.approx(50, abs=2)


def test_one_stalled_step_closes_the_budget_for_a_while_only() -> None:
    budget = ChunkBudget(512)
    for _ in range(10):
        GPU.run(budget, decoding=8, prompt=0)
        GPU.run(budget, decoding=8, prompt=10_000)
    budget.observe(2.0, prefilled=100, decoded=8)
    assert budget.tokens(decoding=8, waiting=1) == MIN_CHUNK_TOKENS
    for _ in range(30):
        GPU.run(budget, decoding=8, prompt=10_000)
    assert budget.tokens(decoding=8, waiting=1) > 90


def test_one_stalled_decode_does_not_open_the_budget() -> None:
    budget = ChunkBudget(512)
    for _ in range(10):
        GPU.run(budget, decoding=8, prompt=0)
        GPU.run(budget, decoding=8, prompt=10_000)
    budget.observe(2.0, prefilled=0, decoded=8)
    assert budget.tokens(decoding=8, waiting=1) <= 126


def test_the_budget_opens_by_steps_that_were_seen_to_work() -> None:
    budget = ChunkBudget(4_096)
    budget.observe(0.020, prefilled=0, decoded=8)
    budget.observe(0.0, prefilled=512, decoded=0)
    assert budget.tokens(decoding=8, waiting=1) == 2 * MIN_CHUNK_TOKENS
    budget.observe(0.020, prefilled=64, decoded=8)
    assert budget.tokens(decoding=8, waiting=1) == 4 * MIN_CHUNK_TOKENS


def test_many_waiting_requests_outweigh_few_decoding_ones() -> None:
    budget = ChunkBudget(512)
    for _ in range(5):
        GPU.run(budget, decoding=2, prompt=0)
        GPU.run(budget, decoding=2, prompt=10_000)
    assert budget.tokens(decoding=2, waiting=2) == pytest.approx(100, abs=2)
    assert budget.tokens(decoding=2, waiting=4) > 150


def test_however_many_wait_a_step_keeps_the_pace_of_decoding_requests() -> None:
    budget = ChunkBudget(4_096)
    for _ in range(5):
        GPU.run(budget, decoding=2, prompt=0)
    steps = [GPU.run(budget, decoding=2, prompt=10_000, waiting=400) for _ in range(20)]
    assert max(steps) <= 2.5 * GPU.decode_s
    assert steps[-1] == pytest.approx(MAX_SLOWDOWN * GPU.decode_s, rel=0.02)


@pytest.mark.parametrize("most", [1, 8, 31])
def test_a_limit_below_the_least_chunk_holds(most: int) -> None:
    budget = ChunkBudget(most)
    assert budget.tokens(decoding=0, waiting=1) == most
    assert budget.tokens(decoding=4, waiting=1) == most
