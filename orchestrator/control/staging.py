"""Whose turn it is to start: one worker loads at a time, first starts and restarts alike."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mlx_dp.orchestrator.control.supervisor_steps import Loss, LossKind, Spawn
from mlx_dp.orchestrator.control.worker_record import WorkerRecord
from mlx_dp.orchestrator.service import WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLimits:
    """``hello_timeout_s``: from the spawn to the first word, before anything is loaded."""

    hello_timeout_s: float = 60.0
    start_timeout_s: float = 600.0


class Staging:
    """Gives each start its turn, its identity and its deadlines."""

    def __init__(
        self, workers: Sequence[WorkerRecord], limits: StartLimits, rng: random.Random
    ) -> None:
        self._workers: Final = workers
        self._limits: Final = limits
        self._rng: Final = rng

    def next(self, now: float) -> list[Spawn]:
        """Begin the next start, unless one is still under way."""
        # A start that has failed is over only once its process is gone, and with it its memory.
        if any(each.process and not each.served for each in self._workers):
            return []
        for worker in self._workers:
            if worker.status is WorkerStatus.STARTING and not worker.process:
                worker.spawns += 1
                worker.identity = f"w{worker.index}-{self._rng.getrandbits(64):016x}"
                worker.pid = None
                worker.process = True
                worker.greeted = False
                worker.served = False
                worker.start_deadline = now + self._limits.hello_timeout_s
                return [Spawn(worker.index, worker.identity)]
        return []

    def greeted(self, worker: WorkerRecord, now: float) -> None:
        """It is up, and begins to load."""
        worker.greeted = True
        worker.start_deadline = now + self._limits.start_timeout_s

    def late(self, now: float) -> WorkerRecord | None:
        """The worker whose start takes too long, if any."""
        for worker in self._workers:
            starts = worker.status is WorkerStatus.STARTING and worker.process
            if starts and worker.start_deadline <= now:
                return worker
        return None

    def too_late(self, worker: WorkerRecord) -> Loss:
        """What to say of it."""
        detail = f"no hello after {self._limits.hello_timeout_s:g} s"
        if worker.greeted:
            detail = f"not ready after {self._limits.start_timeout_s:g} s"
        return Loss(kind=LossKind.START_TIMEOUT, detail=detail)

    def forgive(self, missed_s: float) -> None:
        """No start is late by what the controller slept."""
        for worker in self._workers:
            worker.start_deadline += missed_s
