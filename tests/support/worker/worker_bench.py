"""A worker's loop with scripted commands and a virtual clock; only waiting moves time."""

from typing import TypeVar

from mlx_dp.proto.capacity.ownership import OwnerCapacity, auxiliary_ratio
from mlx_dp.proto.messages.protocol import Down, FakeEngineOptions, Heartbeat, Submit, Up
from mlx_dp.worker.fake.engine import KV_BYTES_PER_TOKEN, FakeEngine
from mlx_dp.worker.heartbeat import HeartbeatSchedule
from mlx_dp.worker.loop import WorkerLoop
from mlx_dp.worker.scheduling.chunk_budget import ChunkBudget
from mlx_dp.worker.scheduling.scheduler import Scheduler

_Kind = TypeVar("_Kind", bound=Up)


class VirtualTime:
    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeChannel:
    """Delivers queued commands, and keeps sent events. A wait lasts its full time."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.commands: list[Down] = []
        self.sent: list[Up] = []
        self.congested = False
        self.malformed_frames = 0
        self.waits: list[float] = []

    def send(self, message: Up) -> None:
        self.sent.append(message)

    def drain(self) -> list[Down]:
        commands, self.commands = self.commands, []
        return commands

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        self._time.sleep(timeout_s)
        return False

    def sent_of(self, kind: type[_Kind]) -> list[_Kind]:
        return [message for message in self.sent if isinstance(message, kind)]

    def take(self) -> list[Up]:
        """The events since the last call."""
        sent, self.sent = self.sent, []
        return sent


class Bench:
    """A loop, and all of its parts."""

    def __init__(
        self,
        *,
        options: FakeEngineOptions = FakeEngineOptions(),  # noqa: B008  # frozen
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
