"""A device that counts buffers is never asked for more than it has, even within the bytes."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.messages.events import Heartbeat, Prefilled, Up
from mlx_dp.worker.engine.mlx_engine import MlxEngine
from mlx_dp.worker.heartbeat import HeartbeatSchedule
from mlx_dp.worker.loop import WorkerLoop
from mlx_dp.worker.scheduling.chunk_budget import ChunkBudget
from mlx_dp.worker.scheduling.scheduler import Scheduler
from tests.support.models.tiny_models import ARCHITECTURES
from tests.support.worker.fake_channel import FakeChannel, VirtualTime
from tests.support.worker.worker_bench import submit
from tests.support.worker.worker_starts import mlx_start

pytestmark = pytest.mark.mlx

RESOURCE_LIMIT = 240
PROMPT = 12


class Owner:
    """A worker's loop over a model, on a device that counts buffers."""

    def __init__(self, directory: Path) -> None:
        self.engine = MlxEngine.load(mlx_start(directory, memory_nbytes=2**30))
        capacity = OwnerCapacity(
            request_slots=4, auxiliary_slots=400, pool_tokens=100_000, cache_nbytes=2**28
        )
        self.engine.open(capacity)
        self.engine.warm_up()
        self.scheduler = Scheduler(capacity, self.engine, 1_000)
        self.time = VirtualTime()
        self.channel = FakeChannel(self.time)
        self.loop = WorkerLoop(
            self.channel,
            self.engine,
            self.scheduler,
            ChunkBudget(512),
            HeartbeatSchedule(1.0, lambda: 4_096),
            self.time.clock,
        )
        self.most_buffers = 0

    def serve(self, number: int, prompt: tuple[int, ...]) -> int:
        """Run one request, and return the number of its tokens from the cache."""
        self.channel.commands.append(submit(number, prompt=prompt, max_tokens=2))
        sent: list[Up] = []
        while True:
            assert self.loop.run_once() is None
            sent += self.channel.take()
            self.most_buffers = max(self.most_buffers, self.engine.held_buffers)
            if not len(self.scheduler.requests):
                break
        return next(m.cached_tokens for m in sent if isinstance(m, Prefilled))

    def heartbeat(self) -> Heartbeat:
        """The next heartbeat."""
        self.time.sleep(1.0)
        assert self.loop.run_once() is None
        (heartbeat,) = (
            message for message in self.channel.take() if isinstance(message, Heartbeat)
        )
        return heartbeat


def prompt_of(number: int) -> tuple[int, ...]:
    """No two of these share a prefix."""
    return (number % 250, number // 250, *range(PROMPT - 2))


@pytest.fixture
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {**mx.device_info(), "resource_limit": RESOURCE_LIMIT}
    monkeypatch.setattr(mx, "device_info", lambda: known)


@pytest.mark.usefixtures("_counted")
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
@pytest.mark.parametrize(
    "requests", [100, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_distinct_short_requests_stay_within_half_of_the_buffers(name, requests, tmp_path):
    owner = Owner(ARCHITECTURES[name].write(tmp_path))
    for number in range(requests):
        assert owner.serve(number, prompt_of(number)) == 0
    assert owner.most_buffers <= RESOURCE_LIMIT // 2
    settled = owner.engine.held_nbytes
    recent = [owner.serve(requests + at, prompt_of(requests - at)) for at in range(1, 6)]
    # Those served last are still held; the oldest made room for them.
    assert recent == [PROMPT - 1] * 5
    assert owner.serve(requests + 6, prompt_of(0)) == 0
    assert owner.engine.held_nbytes <= settled
    assert owner.most_buffers <= RESOURCE_LIMIT // 2
    assert owner.heartbeat().held_buffers == owner.engine.held_buffers > 0


def test_a_device_that_counts_none_holds_what_its_bytes_allow(tmp_path):
    owner = Owner(ARCHITECTURES["llama"].write(tmp_path))
    for number in range(80):
        owner.serve(number, prompt_of(number))
    assert owner.engine.held_buffers > RESOURCE_LIMIT // 2
    assert owner.serve(80, prompt_of(0)) == PROMPT - 1
