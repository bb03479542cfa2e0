"""A worker's loop and scheduler over a small budget, and a controller that replays, by a seed."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import assert_never

from worker_bench import FakeChannel, VirtualTime

from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.proto.capacity.ownership import OwnerCapacity, auxiliary_ratio
from mlx_dp.proto.messages.protocol import (
    Abort,
    Accepted,
    FakeEngineOptions,
    Finished,
    FinishReason,
    Flush,
    Flushed,
    Heartbeat,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    Submit,
    Tokens,
)
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import Drawn, StepPlan
from mlx_dp.worker.fake.engine import FakeEngine
from mlx_dp.worker.fake.tokens import FakeAnswer
from mlx_dp.worker.heartbeat import HeartbeatSchedule
from mlx_dp.worker.loop import WorkerLoop
from mlx_dp.worker.scheduling.chunk_budget import ChunkBudget
from mlx_dp.worker.scheduling.scheduler import Scheduler

VOCAB_SIZE = 300
CONTEXT_LENGTH = 400
GREEDY = SamplingParams(temperature=0.0)
MAX_TURNS = 20_000
STOP = 32
"""A space, which ends the answers of those that stop there after their first word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a simulation runs in: a budget of ``pool`` tokens, and of ``states`` on top.

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
        assert self.held_nbytes <= self.budget_nbytes, "kept what there was no room for"


@dataclass(slots=True, eq=False)
class Job:
    """A request as the controller knows it."""

    submit: Submit
    wanted: tuple[int, ...]
    emitted: list[int] = field(default_factory=list)
    epoch: int = 0
    prefilled: bool = False
    """Prefilled was sent in this grant."""
    cached: list[int] = field(default_factory=list)
    end: FinishReason | None = None

    @property
    def grant(self) -> Submit:
        return replace(self.submit, epoch=self.epoch, output_ids=tuple(self.emitted))


class WorkerSimulation:
    """Grants at random, takes what comes back, and demands the answers of an undisturbed run."""

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
        self.jobs: dict[int, Job] = {}
        self.queue: deque[Job] = deque()
        self.granted: dict[int, Job] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.preempted = 0
        self.rejected = 0
        self.flushed = 0

    def run(self, num_requests: int) -> None:
        to_come = num_requests
        for _ in range(MAX_TURNS):
            if not to_come and not self.queue and not self.granted:
                break
            while to_come and self.rng.random() < 0.4:
                self._arrive()
                to_come -= 1
            self._say()
            assert self.loop.run_once() is None
            self._hear()
            self.scheduler.check()
        else:
            raise AssertionError(f"not done after {MAX_TURNS} turns: {self.granted}")
        assert all(job.end is not None for job in self.jobs.values())
        self._leaves_nothing()

    def _arrive(self) -> None:
        request_id = len(self.jobs)
        prompt = self._prompt()
        max_tokens = self.rng.randint(1, min(60, self.setting.pool + 1 - len(prompt)))
        stop = (STOP,) if self.rng.random() < 0.3 else ()
        answer = FakeAnswer(0, VOCAB_SIZE, prompt, GREEDY)
        wanted = [answer.token(position) for position in range(max_tokens)]
        if stop and STOP in wanted:
            wanted = wanted[: wanted.index(STOP) + 1]
        job = Job(
            Submit(
                request_id=request_id,
                epoch=0,
                prompt_ids=prompt,
                max_tokens=max_tokens,
                stop_token_ids=stop,
                params=GREEDY,
                cache_salt=self.rng.choice(("", "", "", "other")),
            ),
            tuple(wanted),
        )
        self.jobs[request_id] = job
        self.queue.append(job)
        self.prompts += [prompt, prompt + job.wanted]

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
            job = self.queue.popleft()
            job.epoch += 1
            job.prefilled = False
            self.granted[job.submit.request_id] = job
            self.wire.verbs.append(job.grant)
        if self.granted and self.rng.random() < self.setting.aborts:
            job = self.rng.choice(list(self.granted.values()))
            self.wire.verbs.append(Abort(request_id=job.submit.request_id, epoch=job.epoch))
        if self.rng.random() < self.setting.flushes:
            self.wire.verbs.append(Flush(flush_id=self.rng.randrange(100)))

    def _hear(self) -> None:
        for message in self.wire.take():
            match message:
                case Accepted() | Heartbeat():
                    pass
                case Rejected():
                    assert message.reason in (RejectReason.NO_SLOT, RejectReason.NO_TOKENS), message
                    self.rejected += 1
                    self.queue.append(self.granted.pop(message.request_id))
                case Prefilled():
                    job = self.granted[message.request_id]
                    assert not job.prefilled and message.epoch == job.epoch
                    assert message.cached_tokens < len(job.submit.prompt_ids) + len(job.emitted)
                    job.prefilled = True
                    job.cached.append(message.cached_tokens)
                case Tokens():
                    self._take(message)
                case Preempted():
                    job = self.granted.pop(message.request_id)
                    assert message.num_tokens == len(job.emitted)
                    self.preempted += 1
                    self.queue.appendleft(job)
                case Finished():
                    self._finish(message)
                case Flushed():
                    self.flushed += message.num_tokens
                case _:
                    raise AssertionError(message)

    def _take(self, tokens: Tokens) -> None:
        for chunk in tokens.chunks:
            job = self.granted[chunk.request_id]
            assert job.prefilled, f"tokens of {chunk.request_id} before Prefilled"
            assert chunk.index == len(job.emitted)
            job.emitted += chunk.ids

    def _finish(self, finished: Finished) -> None:
        job = self.granted.pop(finished.request_id)
        assert finished.num_tokens == len(job.emitted)
        job.end = finished.reason
        emitted = tuple(job.emitted)
        match finished.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                assert emitted == job.wanted, finished
            case FinishReason.ABORT:
                assert emitted == job.wanted[: len(emitted)], finished
            case FinishReason.ERROR:
                raise AssertionError(finished)
            case _:
                assert_never(finished.reason)

    def _leaves_nothing(self) -> None:
        """What is held when nothing runs is the prefix cache, all of which can be dropped."""
        while self.engine.busy:
            assert self.loop.run_once() is None
        self.engine.compact()
        assert self.engine.memory().used_tokens == 0
        assert self.engine.held_nbytes == self.scheduler.cached_nbytes
        self.scheduler.flush(Flush(flush_id=0))
        assert self.engine.held_nbytes == 0
        assert self.scheduler.auxiliary_used == 0
        self.scheduler.check()
