"""A worker's loop and scheduler over a small budget, and a seeded controller that replays."""

import random
from collections import deque
from dataclasses import dataclass

from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.proto.capacity.ownership import OwnerCapacity, auxiliary_ratio
from mlx_dp.proto.messages.commands import Down, FakeEngineOptions, Flush, Submit
from mlx_dp.proto.messages.events import (
    Finished,
    FinishReason,
    Preempted,
    Rejected,
    RejectReason,
    Up,
)
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import Drawn, StepPlan
from mlx_dp.worker.fake.engine import FakeEngine
from mlx_dp.worker.fake.tokens import FakeAnswer
from mlx_dp.worker.heartbeat import HeartbeatSchedule
from mlx_dp.worker.loop import WorkerLoop
from mlx_dp.worker.scheduling.chunk_budget import ChunkBudget
from mlx_dp.worker.scheduling.scheduler import Scheduler
from tests.support.worker.fake_channel import FakeChannel, VirtualTime
from tests.support.worker.fake_controller import FakeController, Request

VOCAB_SIZE = 300
CONTEXT_LENGTH = 400
GREEDY = SamplingParams(temperature=0.0)
MAX_TURNS = 20_000
STOP = 32
"""A space, which ends the responses of those that stop there after their first word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The limits of a simulation: a budget of ``pool`` tokens, and of ``states`` on top.

    ``states`` None: as many as there are auxiliary slots.
    """

    slots: int = 4
    pool: int = 300
    chunk: int = 64
    hybrid: bool = False
    states: int | None = None
    prefix_cache: bool = True
    aborts: float = 0.05
    flushes: float = 0.02


class WatchedEngine(FakeEngine):
    """Asserts at every step that memory is within the budget, or one request runs alone."""

    budget_nbytes: int | None = None
    most_at_once = 0

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        drawn = super().step(plan)
        rows = len(self._rows)
        self.most_at_once = max(self.most_at_once, rows)
        assert self.budget_nbytes is not None
        held = self.held_nbytes
        assert held <= self.budget_nbytes or rows <= 1, (held, self.budget_nbytes, rows)
        return drawn

    def save_prefix(self, slot: int, saves: tuple[Save, ...], snapshot: int | None) -> None:
        super().save_prefix(slot, saves, snapshot)
        assert self.budget_nbytes is not None
        assert self.held_nbytes <= self.budget_nbytes, "kept a prefix without room for it"


class WorkerSimulation:
    """Grants at random, requeues returned requests, and expects an undisturbed run's output."""

    def __init__(self, seed: int, setting: Setting) -> None:
        self.rng = random.Random(seed)
        self.setting = setting
        options = FakeEngineOptions(
            vocab_size=VOCAB_SIZE,
            context_length=CONTEXT_LENGTH,
            pool_tokens=setting.pool,
            hybrid=setting.hybrid,
        )
        self.time = VirtualTime()
        self.engine = WatchedEngine(
            options, clock=self.time.clock, sleep=self.time.sleep, prefix_cache=setting.prefix_cache
        )
        ratio = auxiliary_ratio(prefix_cache=setting.prefix_cache)
        auxiliary_slots = setting.slots * ratio if setting.hybrid else 0
        states = auxiliary_slots if setting.states is None else setting.states
        shape = self.engine.facts.shape
        nbytes = shape.kv_nbytes(setting.pool) + states * shape.auxiliary_bytes_per_slot
        self.engine.budget_nbytes = nbytes
        capacity = OwnerCapacity(
            request_slots=setting.slots,
            auxiliary_slots=auxiliary_slots,
            pool_tokens=setting.pool,
            cache_nbytes=nbytes,
        )
        self.engine.open(capacity)
        self.scheduler = Scheduler(capacity, self.engine, CONTEXT_LENGTH)
        self.wire = FakeChannel(self.time)
        self.loop = WorkerLoop(
            self.wire,
            self.engine,
            self.scheduler,
            ChunkBudget(setting.chunk),
            HeartbeatSchedule(1e9, lambda: 0),
            self.time.clock,
        )
        self.controller = FakeController(self._put_back)
        self.queue: deque[Request] = deque()
        self.wanted: list[tuple[int, ...]] = []
        """The undisturbed output of each request."""
        self.prompts: list[tuple[int, ...]] = []

    def run(self, num_requests: int) -> None:
        to_come = num_requests
        for _ in range(MAX_TURNS):
            if not to_come and not self.queue and not self.controller.open:
                break
            while to_come and self.rng.random() < 0.4:
                self._arrive()
                to_come -= 1
            self._say()
            assert self.loop.run_once() is None
            for message in self.wire.take():
                self._hear(message)
            self.scheduler.check()
        else:
            raise AssertionError(f"not done after {MAX_TURNS} turns: {self.controller.open}")
        requests = self.controller.requests
        assert len(requests) == num_requests
        assert all(request.finished is not None for request in requests.values())
        self._leaves_nothing()

    def _arrive(self) -> None:
        request_id = len(self.wanted)
        prompt = self._prompt()
        max_tokens = self.rng.randint(1, min(60, self.setting.pool + 1 - len(prompt)))
        stop = (STOP,) if self.rng.random() < 0.3 else ()
        answer = FakeAnswer(0, VOCAB_SIZE, prompt, GREEDY)
        wanted = [answer.token(position) for position in range(max_tokens)]
        if stop and STOP in wanted:
            wanted = wanted[: wanted.index(STOP) + 1]
        submit = Submit(
            request_id=request_id,
            epoch=0,
            prompt_ids=prompt,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            params=GREEDY,
            cache_salt=self.rng.choice(("", "", "", "other")),
        )
        self.wanted.append(tuple(wanted))
        self.queue.append(Request(submit))
        self.prompts += [prompt, prompt + self.wanted[-1]]

    def _prompt(self) -> tuple[int, ...]:
        """Often the beginning of an earlier prompt or turn, or all of it."""
        longest = min(self.setting.pool, CONTEXT_LENGTH - 60) - 1
        prompt: tuple[int, ...] = ()
        if self.prompts and self.rng.random() < 0.7:
            earlier = self.rng.choice(self.prompts[-12:])
            cut = self.rng.choice((len(earlier), self.rng.randint(0, len(earlier))))
            prompt = earlier[:cut]
        more = self.rng.choice((0, 1, 7, 64, 65, 130))
        prompt += tuple(self.rng.randrange(4) for _ in range(more))
        return prompt[:longest] or (1,)

    def _say(self) -> None:
        if self.queue and self.rng.random() < 0.7:
            self.wire.commands.append(self.controller.grant(self.queue.popleft()))
        if self.controller.open and self.rng.random() < self.setting.aborts:
            self._send(self.rng.choice(list(self.controller.open.values())).abort)
        if self.rng.random() < self.setting.flushes:
            self._send(Flush(flush_id=self.rng.randrange(100)))

    def _send(self, command: Down) -> None:
        self.controller.sent(command)
        self.wire.commands.append(command)

    def _hear(self, message: Up) -> None:
        self.controller.receive(message)
        assert self.controller.failed is None, message
        if isinstance(message, Finished):
            ids = tuple(self.controller.requests[message.request_id].ids)
            wanted = self.wanted[message.request_id]
            aborted = message.reason is FinishReason.ABORT
            assert ids == (wanted[: len(ids)] if aborted else wanted), message

    def _put_back(self, request: Request, message: Preempted | Rejected) -> None:
        if isinstance(message, Preempted):
            self.queue.appendleft(request)
        else:
            assert message.reason in (RejectReason.NO_SLOT, RejectReason.NO_TOKENS), message
            self.queue.append(request)

    def _leaves_nothing(self) -> None:
        """An idle worker holds only the prefix cache, all of which can be dropped."""
        while self.engine.busy:
            assert self.loop.run_once() is None
        self.engine.compact()
        assert self.engine.memory().used_tokens == 0
        assert self.engine.held_nbytes == self.scheduler.cached_nbytes
        self.scheduler.flush(Flush(flush_id=0))
        assert self.engine.held_nbytes == 0
        assert self.scheduler.auxiliary_used == 0
        self.scheduler.check()
