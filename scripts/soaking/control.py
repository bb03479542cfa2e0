"""A stand-in for the controller: it grants, cancels, replays, and checks all events."""

from collections import deque
from dataclasses import dataclass

from mlx_dp.proto.messages.commands import Flush, Submit
from mlx_dp.proto.messages.events import (
    Failed,
    Finished,
    FinishReason,
    Flushed,
    Heartbeat,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    Tokens,
    Up,
)
from scripts.benchmarks.engine.worker import LocalWorker
from scripts.soaking.requests import RequestMaker, SoakRequest
from tests.support.worker.fake_controller import FakeController, Request

PATIENCE_TURNS = 5_000
"""Runs of the loop without a request's event after which the worker counts as stuck."""


@dataclass(slots=True, eq=False)
class Job:
    """One request, as drawn and with its course. It is cancelled at the loop run ``cancel_at``."""

    request: SoakRequest
    record: Request
    cancel_at: int | None = None
    cancelled: bool = False

    @property
    def request_id(self) -> int:
        return self.record.request_id

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def answer(self) -> list[int]:
        return self.record.ids


@dataclass(slots=True)
class Counters:
    """Counters of events, to check that the soak covered all cases."""

    ended: int = 0
    cancelled: int = 0
    preempted: int = 0
    refused: int = 0
    replayed: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0


class SoakControl:
    """Keeps one worker's slots full, from a queue; preempted requests return to its front.

    A request that was refused for lack of memory waits until another one ends, as in the real
    controller; refused on an idle worker, it would wait forever, which is a failure.
    """

    def __init__(self, worker: LocalWorker, maker: RequestMaker) -> None:
        self.counters = Counters()
        self.finished: list[Job] = []
        self._worker = worker
        self._maker = maker
        self._slots = worker.capacity.request_slots
        self._controller = FakeController(self._put_back)
        self._queue: deque[Job] = deque()
        self._jobs: dict[int, Job] = {}
        """Requests that have not ended."""
        self._turn = self._moved_at = 0
        self._next_id = 1
        self._blocked = False

    @property
    def idle(self) -> bool:
        return not self.running and not self._queue and not self._worker.engine.busy

    @property
    def running(self) -> int:
        return len(self._controller.open)

    def run_once(self, *, more: bool) -> None:
        """Grant, run the loop once, and handle its events; ``more``: draw new requests as well."""
        self._turn += 1
        self.finished.clear()
        self._cancel_due()
        self._grant(more=more)
        for message in self._worker.run_once():
            self._hear(message)
        if self.running and self._turn - self._moved_at > PATIENCE_TURNS:
            open_ids = sorted(self._controller.open)
            raise RuntimeError(f"no request progresses: {open_ids} of {self._slots} slots")

    def flush(self) -> Flushed:
        """Drop cached prefixes. Call it while idle."""
        flush = Flush(flush_id=self._turn)
        self._controller.sent(flush)
        self._worker.send(flush)
        self.run_once(more=False)
        flushed = self._controller.flushed
        assert flushed is not None and flushed.flush_id == flush.flush_id, flushed
        return flushed

    def _grant(self, *, more: bool) -> None:
        while not self._blocked and self.running < self._slots:
            if not self._queue:
                if not more:
                    return
                self._queue.append(self._drawn())
            job = self._queue.popleft()
            if not job.epoch and job.request.cancel_after is not None:
                job.cancel_at = self._turn + job.request.cancel_after
            self._worker.send(self._controller.grant(job.record))

    def _drawn(self) -> Job:
        request = self._maker.draw()
        submit = Submit(
            request_id=self._next_id,
            epoch=0,
            prompt_ids=request.prompt_ids,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            params=request.params,
            cache_salt=request.cache_salt,
        )
        job = Job(request, Request(submit))
        self._jobs[self._next_id] = job
        self._next_id += 1
        return job

    def _cancel_due(self) -> None:
        for job in tuple(self._jobs.values()):
            if job.cancel_at is None or job.cancel_at > self._turn:
                continue
            job.cancel_at = None
            job.cancelled = True
            if job.request_id in self._controller.open:
                self._controller.sent(job.record.abort)
                self._worker.send(job.record.abort)
            else:
                self._queue.remove(job)
                self._end(job)

    def _hear(self, message: Up) -> None:
        if not isinstance(message, Heartbeat):
            self._moved_at = self._turn
        self._controller.receive(message)
        match message:
            case Tokens(chunks=chunks):
                self.counters.answer_tokens += sum(len(chunk.ids) for chunk in chunks)
            case Prefilled(request_id=request_id, cached_tokens=cached_tokens):
                job = self._jobs[request_id]
                self.counters.prefilled_tokens += len(job.request.prompt_ids) + len(job.answer)
                self.counters.cached_tokens += cached_tokens
            case Finished():
                self._finish(message)
            case Failed():
                raise RuntimeError(f"the worker failed: {message.message}")
            case _:
                pass

    def _finish(self, message: Finished) -> None:
        job = self._jobs[message.request_id]
        self._blocked = False
        self.counters.replayed += job.epoch > 1
        if message.reason is not FinishReason.ABORT:
            job.cancelled = False
            self.finished.append(job)
            self._maker.ended(job.request, job.answer)
        self._end(job)

    def _end(self, job: Job) -> None:
        del self._jobs[job.request_id]
        self._controller.forget(job.record)
        self.counters.ended += 1
        self.counters.cancelled += job.cancelled

    def _put_back(self, request: Request, message: Preempted | Rejected) -> None:
        if isinstance(message, Preempted):
            self._blocked = False
            self.counters.preempted += 1
        else:
            assert message.reason is RejectReason.NO_TOKENS, message
            assert self.running, f"refused although nothing runs: {message}"
            self._blocked = True
            self.counters.refused += 1
        job = self._jobs[request.request_id]
        if job.cancelled:
            # The abort met a request that was gone, so no end of it will be reported.
            self._end(job)
        else:
            self._queue.appendleft(job)
