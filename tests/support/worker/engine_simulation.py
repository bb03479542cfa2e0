"""Seeded requests that join, leave, are evicted and continue in slots of other requests."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import Engine, EngineRequest, PrefillChunk, StepPlan

GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (1, 2, 7, 8, 33, 64, 120, 262)
ANSWERS = (12, 1, 9, 17, 3, 14, 2, 6)
EVICTION = 0.15
MAX_EVICTIONS = 3
MAX_STEPS = 5_000


@dataclass(slots=True)
class Job:
    """A request, and its tokens so far, from any slot."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = GREEDY
    answer: list[int] = field(default_factory=list)

    @property
    def request(self) -> EngineRequest:
        return EngineRequest(
            prompt_ids=self.prompt_ids,
            output_ids=tuple(self.answer),
            max_tokens=self.max_tokens,
            params=self.params,
        )

    @property
    def done(self) -> bool:
        return len(self.answer) == self.max_tokens


@dataclass(slots=True)
class Simulation:
    """Feeds an open engine with at most ``slots`` slots and chunks of at most ``chunk``.

    The tokens of an evicted request become its ``output_ids``, as when its owner was lost.
    """

    engine: Engine
    rng: random.Random
    slots: int
    chunk: int
    evicted: int = 0
    most_at_once: int = 0
    _running: dict[int, Job] = field(default_factory=dict)
    _unfilled: dict[int, int] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = deque(jobs)
        for _ in range(MAX_STEPS):
            if not waiting and not self._running:
                break
            if waiting and (not self._running or self.rng.random() < 0.5):
                self._add(waiting)
            for drawn in self.engine.step(self._plan()):
                job = self._running[drawn.slot]
                job.answer.append(drawn.token)
                if job.done:
                    self._remove(drawn.slot)
            self.most_at_once = max(self.most_at_once, len(self._running))
            may_evict = self._running and self.evicted < MAX_EVICTIONS
            if may_evict and self.rng.random() < EVICTION:
                waiting.append(self._remove(self.rng.choice(sorted(self._running))))
                self.evicted += 1
        while self.engine.busy:
            assert self.engine.step(StepPlan()) == ()
        assert all(job.done for job in jobs), jobs
        assert self.engine.memory().used_tokens == 0

    def _add(self, waiting: deque[Job]) -> None:
        free = sorted(set(range(self.slots)) - self._running.keys())
        if free:
            slot, job = self.rng.choice(free), waiting.popleft()
            self.engine.add(slot, job.request)
            self._running[slot] = job
            self._unfilled[slot] = job.request.prefill_tokens

    def _remove(self, slot: int) -> Job:
        self.engine.remove(slot)
        del self._unfilled[slot]
        return self._running.pop(slot)

    def _plan(self) -> StepPlan:
        """Chunks for some of the slots, now and then fewer tokens than allowed."""
        chunks = []
        for slot, left in self._unfilled.items():
            if left and self.rng.random() < 0.7:
                num_tokens = min(left, self.chunk)
                if self.rng.random() < 0.2:
                    num_tokens = self.rng.randint(1, num_tokens)
                chunks.append(PrefillChunk(slot=slot, num_tokens=num_tokens))
                self._unfilled[slot] -= num_tokens
        return StepPlan(prefill=tuple(chunks))


def random_jobs(rng: random.Random, vocab_size: int) -> list[Job]:
    jobs = [
        Job(tuple(rng.randrange(vocab_size) for _ in range(length)), answer)
        for length, answer in zip(LENGTHS, ANSWERS, strict=True)
    ]
    rng.shuffle(jobs)
    return jobs
