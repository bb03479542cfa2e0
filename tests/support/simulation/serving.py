"""The inside of a ready worker process: the real loop over a watched engine."""

from dataclasses import dataclass, replace

from mlx_dp.proto.capacity.ownership import resolve_capacity
from mlx_dp.proto.messages.commands import FakeEngineOptions, Start
from mlx_dp.proto.messages.events import Ready
from mlx_dp.worker.contract.engine import Drawn, EngineRequest, StepPlan
from mlx_dp.worker.fake.engine import FakeEngine
from mlx_dp.worker.heartbeat import HeartbeatSchedule
from mlx_dp.worker.loop import WorkerLoop
from mlx_dp.worker.scheduling.chunk_budget import ChunkBudget
from mlx_dp.worker.scheduling.scheduler import Scheduler
from tests.support.simulation.agenda import Agenda
from tests.support.simulation.schedule import Setting
from tests.support.simulation.worker_end import WorkerEnd


class WatchedEngine(FakeEngine):
    """Records how much of each slot's prompt came from the cache."""

    def __init__(self, options: FakeEngineOptions, agenda: Agenda, *, prefix_cache: bool) -> None:
        super().__init__(options, clock=agenda.clock, sleep=_never, prefix_cache=prefix_cache)
        self.reused: dict[int, int] = {}

    def add(self, slot: int, request: EngineRequest) -> None:
        super().add(slot, request)
        self.reused[slot] = 0

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        drawn = super().step(plan)
        for chunk in plan.prefill:
            if chunk.prefix is not None:
                self.reused[chunk.slot] = chunk.prefix.num_tokens
        return drawn


@dataclass(slots=True)
class Serving:
    engine: FakeEngine
    scheduler: Scheduler
    loop: WorkerLoop

    @classmethod
    def begin(cls, start: Start, setting: Setting, agenda: Agenda, end: WorkerEnd) -> "Serving":
        """Load the engine, and report Ready."""
        engine = WatchedEngine(start.fake, agenda, prefix_cache=start.prefix_cache)
        end.reused = engine.reused
        shape = engine.facts.shape
        capacity = resolve_capacity(
            start.share,
            pool_tokens=start.fake.pool_tokens,
            hybrid=shape.hybrid,
            prefix_cache=start.prefix_cache,
        )
        states = setting.slots * shape.auxiliary_bytes_per_slot
        nbytes = shape.kv_nbytes(setting.memory_tokens) + states
        capacity = replace(capacity, cache_nbytes=nbytes)
        engine.open(capacity)
        scheduler = Scheduler(capacity, engine, shape.context_length)
        loop = WorkerLoop(
            end,
            engine,
            scheduler,
            ChunkBudget(start.chunked_prefill_size),
            HeartbeatSchedule(start.heartbeat_interval_s, lambda: 4_096),
            agenda.clock,
        )
        end.send(
            Ready(
                capacity=capacity,
                shape=shape,
                context_length=shape.context_length,
                device="fake",
                load_s=0.0,
            )
        )
        return cls(engine, scheduler, loop)

    def check(self) -> None:
        """I1, on the worker's side."""
        try:
            self.scheduler.check()
        except AssertionError as error:
            raise AssertionError(f"I1: its own check found {error}") from error
        held = len(self.scheduler.requests)
        slots = self.scheduler._pools._slots
        assert slots.size - slots.free_slots == held, f"I1: {held} requests, {slots.free_slots}"


def _never(seconds: float) -> None:
    raise AssertionError(f"the fake engine sleeps for {seconds} s")
