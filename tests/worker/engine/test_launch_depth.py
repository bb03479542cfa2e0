"""The chunk budget keeps its goal on a device whose launches block, or do not, like Metal's."""

import random
from itertools import count

import pytest

from mlx_dp.proto.messages.commands import FakeEngineOptions
from mlx_dp.worker.contract.engine import Drawn, StepPlan
from mlx_dp.worker.fake.engine import FakeEngine
from tests.support.worker.worker_bench import Bench, submit

DECODE_S, TOKEN_S = 0.02, 0.0006
IN_FLIGHT = 10
"""Command buffers that Metal takes before a launch waits for one of them."""
AIM = 2.5


class CommandBuffers(FakeEngine):
    """Steps of ``num_buffers`` command buffers each, with a limited number in flight at once."""

    num_buffers = 60

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.steps: list[tuple[int, float]] = []
        self._blocks = False

    @property
    def launch_blocks(self) -> bool:
        return self._blocks

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        before = self._launched
        self._launched = launched = self._launch(plan)
        began_at = self._clock()
        rest_s = self._last_s * min(1.0, IN_FLIGHT / self.num_buffers)
        self._sleep(max(0.0, launched.done_at - rest_s - began_at))
        launched_at = self._clock()
        if before is not None:
            self._sleep(max(0.0, before.done_at - launched_at))
            self._blocks = launched_at - began_at > self._clock() - launched_at
        return () if before is None else tuple(before.drawn)

    def _duration_s(self, prefilled: int, *, decoded: bool) -> float:
        self._last_s = DECODE_S * decoded + TOKEN_S * prefilled
        if decoded:
            self.steps.append((prefilled, self._last_s))
        return self._last_s


class Shallow(CommandBuffers):
    """Few command buffers: a launch never waits."""

    num_buffers = 5


class Unmeasured(CommandBuffers):
    """As before launches were measured: a launch is assumed not to wait."""

    @property
    def launch_blocks(self) -> bool:
        return False


def slow_share(engine: type[CommandBuffers]) -> float:
    """Let prompts come to running streams, eight at once.

    Return the share of the steps with prompt tokens that took more than ``AIM`` decode steps.
    """
    rng = random.Random(1)
    bench = Bench(
        options=FakeEngineOptions(context_length=40_000, pool_tokens=100_000),
        engine=engine,
        slots=16,
        chunk=512,
        pool=100_000,
    )
    numbers = count()
    for _ in range(4):
        bench.run_once(submit(next(numbers), prompt=8, max_tokens=4_000))
    for _ in range(100):
        bench.run_once()
    for _ in range(5):
        lengths = [rng.randint(300, 1_500) for _ in range(8)]
        bench.run_once(*(submit(next(numbers), prompt=n, max_tokens=4) for n in lengths))
        for _ in range(80):
            bench.run_once()
    found = [seconds for prefilled, seconds in bench.engine.steps[100:] if prefilled]
    assert len(found) > 300, len(found)
    return sum(seconds > AIM * DECODE_S for seconds in found) / len(found)


@pytest.mark.parametrize("engine", [CommandBuffers, Shallow])
def test_steps_with_prompts_keep_the_pace_whether_launches_block_or_not(
    engine: type[CommandBuffers],
) -> None:
    assert slow_share(engine) <= 0.02


def test_launches_that_block_unnoticed_would_not_keep_it() -> None:
    assert slow_share(Unmeasured) > 0.3
