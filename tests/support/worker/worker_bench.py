"""A worker's loop with scripted commands and a virtual clock; only waiting moves time."""

from mlx_dp.proto.capacity.ownership import OwnerCapacity, auxiliary_ratio
from mlx_dp.proto.messages.commands import Down, FakeEngineOptions, Submit
from mlx_dp.proto.messages.events import Heartbeat, Up
from mlx_dp.worker.fake.engine import KV_BYTES_PER_TOKEN, FakeEngine
from mlx_dp.worker.heartbeat import HeartbeatSchedule
from mlx_dp.worker.loop import WorkerLoop
from mlx_dp.worker.scheduling.chunk_budget import ChunkBudget
from mlx_dp.worker.scheduling.scheduler import Scheduler
from tests.support.worker.fake_channel import FakeChannel, VirtualTime


class Bench:
    """A loop, and all of its parts."""

    def __init__(
        self,
        *,
        options: FakeEngineOptions = FakeEngineOptions(),
        engine: type[FakeEngine] = FakeEngine,
        slots: int = 2,
        budget: int | None = None,
        chunk: int = 64,
        pool: int = 1_000,
        prefix_cache: bool = False,
        channel: type[FakeChannel] | None = None,
    ) -> None:
        """``budget`` is in tokens of KV."""
        self.time = VirtualTime()
        self.channel = (channel or FakeChannel)(self.time)
        self.engine = engine(
            options, clock=self.time.clock, sleep=self.time.sleep, prefix_cache=prefix_cache
        )
        capacity = OwnerCapacity(
            request_slots=slots,
            auxiliary_slots=slots * auxiliary_ratio(prefix_cache=True) if options.hybrid else 0,
            pool_tokens=pool,
            cache_nbytes=None if budget is None else budget * KV_BYTES_PER_TOKEN,
        )
        self.engine.open(capacity)
        self.scheduler = Scheduler(capacity, self.engine, options.context_length)
        self.loop = WorkerLoop(
            self.channel,
            self.engine,
            self.scheduler,
            ChunkBudget(chunk),
            HeartbeatSchedule(1.0, lambda: 4_096),
            self.time.clock,
        )

    def run_once(self, *commands: Down) -> list[Up]:
        """Run the loop once with these commands; return the events except heartbeats."""
        self.channel.commands.extend(commands)
        assert self.loop.run_once() is None
        return [message for message in self.channel.take() if not isinstance(message, Heartbeat)]


def submit(
    request_id: int,
    *,
    max_tokens: int = 3,
    prompt: int | tuple[int, ...] = 2,
    output_ids: tuple[int, ...] = (),
    salt: str = "",
) -> Submit:
    """``prompt`` are the token ids, or a number of equal ones."""
    return Submit(
        request_id=request_id,
        epoch=1,
        prompt_ids=(65,) * prompt if isinstance(prompt, int) else prompt,
        output_ids=output_ids,
        max_tokens=max_tokens,
        cache_salt=salt,
    )
