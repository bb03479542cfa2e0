"""A stand-in for the controller: it grants, cancels, replays, and checks all events."""

from collections import deque
from dataclasses import dataclass, field

from mlx_dp.proto.messages.protocol import (
    Abort,
    Accepted,
    Failed,
    Finished,
    FinishReason,
    Flush,
    Flushed,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    Submit,
    Tokens,
    Up,
)
from scripts.benchmarks.engine.worker import LocalWorker
from scripts.soaking.requests import RequestMaker, SoakRequest

PATIENCE_TURNS = 5_000
"""Turns without an event about any request, after which the worker counts as stuck."""


@dataclass(slots=True)
class Job:
    """One request over all its grants."""

    request_id: int
    request: SoakRequest
    epoch: int = 0
    answer: list[int] = field(default_factory=list)
    cancel_at: int | None = None
    cancelled: bool = False
    prefilled: bool = False

    @property
    def submit(self) -> Submit:
        return Submit(
            request_id=self.request_id,
            epoch=self.epoch,
            prompt_ids=self.request.prompt_ids,
            output_ids=tuple(self.answer),
            max_tokens=self.request.max_tokens,
            stop_token_ids=self.request.stop_token_ids,
            params=self.request.params,
            cache_salt=self.request.cache_salt,
        )


@dataclass(slots=True)
class Counters:
    """Counters of events, to see that the soak covered all cases."""

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

    A request that was refused for lack of memory waits until another one ends, as it does in the
    real controller; refused where nothing runs, it would wait forever, which is a fault.
    """

    def __init__(self, worker: LocalWorker, maker: RequestMaker) -> None:
        self.counters = Counters()
        self.finished: list[Job] = []
        self.flushed: Flushed | None = None
        self._worker = worker
        self._maker = maker
        self._slots = worker.capacity.request_slots
        self._queue: deque[Job] = deque()
        self._open: dict[int, Job] = {}
        self._turn = self._moved_at = 0
        self._next_id = 1
        self._blocked = False

    @property
    def idle(self) -> bool:
        return not self._open and not self._queue and not self._worker.engine.busy

    @property
    def running(self) -> int:
        return len(self._open)

    def turn(self, *, more: bool) -> None:
        """Grant, run the loop once, and handle its events; ``more``: draw new requests as well."""
        self._turn += 1
        self.finished.clear()
        self._cancel_due()
        self._grant(more=more)
        for message in self._worker.turn():
            self._hear(message)
        if self._open and self._turn - self._moved_at > PATIENCE_TURNS:
            raise RuntimeError(f"nothing moves: {sorted(self._open)} of {self._slots} slots")

    def flush(self) -> Flushed:
        """Drop cached prefixes. Call it while idle."""
        self._worker.send(Flush(flush_id=self._turn))
        self.turn(more=False)
        assert self.flushed is not None and self.flushed.flush_id == self._turn - 1, self.flushed
        return self.flushed

    def _grant(self, *, more: bool) -> None:
        while not self._blocked and len(self._open) < self._slots:
            if not self._queue:
                if not more:
                    return
                self._queue.append(Job(self._next_id, self._maker.draw()))
                self._next_id += 1
            job = self._queue.popleft()
            job.epoch += 1
            job.prefilled = False
            if job.epoch == 1 and job.request.cancel_after is not None:
                job.cancel_at = self._turn + job.request.cancel_after
            self._open[job.request_id] = job
            self._worker.send(job.submit)

    def _cancel_due(self) -> None:
        due = [job for job in (*self._open.values(), *self._queue) if job.cancel_at is not None]
        for job in due:
            assert job.cancel_at is not None
            if job.cancel_at > self._turn:
                continue
            job.cancel_at = None
            job.cancelled = True
            if job.request_id in self._open:
                self._worker.send(Abort(request_id=job.request_id, epoch=job.epoch))
            else:
                self._queue.remove(job)
                self._end(job)

    def _hear(self, message: Up) -> None:
        match message:
            case Tokens(chunks=chunks):
                for chunk in chunks:
                    self._take(chunk.request_id, chunk.epoch, chunk.index, chunk.ids)
            case Prefilled():
                self._prefilled(message)
            case Finished():
                self._finish(message)
            case Preempted():
                self._preempt(message)
            case Rejected():
                self._reject(message)
            case Flushed():
                self.flushed = message
            case Failed():
                raise RuntimeError(f"the worker failed: {message.message}")
            case Accepted():
                assert self._open[message.request_id].epoch == message.epoch, message
            case _:
                return
        self._moved_at = self._turn

    def _take(self, request_id: int, epoch: int, index: int, ids: tuple[int, ...]) -> None:
        job = self._open[request_id]
        assert epoch == job.epoch, (job, epoch)
        assert job.prefilled, f"request {request_id} has tokens before Prefilled"
        assert index == len(job.answer), f"request {request_id}: {index} follows {len(job.answer)}"
        job.answer += ids
        assert len(job.answer) <= job.request.max_tokens, job
        self.counters.answer_tokens += len(ids)

    def _prefilled(self, message: Prefilled) -> None:
        job = self._open[message.request_id]
        assert message.epoch == job.epoch and not job.prefilled, (message, job)
        job.prefilled = True
        tokens = len(job.request.prompt_ids) + len(job.answer)
        assert message.cached_tokens < tokens, (message, tokens)
        self.counters.prefilled_tokens += tokens
        self.counters.cached_tokens += message.cached_tokens

    def _finish(self, message: Finished) -> None:
        job = self._open.pop(message.request_id)
        assert message.epoch == job.epoch and message.num_tokens == len(job.answer), (message, job)
        match message.reason:
            case FinishReason.LENGTH:
                assert len(job.answer) == job.request.max_tokens, job
            case FinishReason.STOP:
                assert job.answer[-1] in job.request.stop_token_ids, job
            case FinishReason.ABORT:
                assert job.cancelled, job
            case FinishReason.ERROR:
                raise RuntimeError(f"request {job.request_id} failed: {message.message}")
        self._blocked = False
        self.counters.replayed += job.epoch > 1
        if message.reason is not FinishReason.ABORT:
            job.cancelled = False
            self.finished.append(job)
            self._maker.ended(job.request, job.answer)
        self._end(job)

    def _end(self, job: Job) -> None:
        self.counters.ended += 1
        self.counters.cancelled += job.cancelled

    def _preempt(self, message: Preempted) -> None:
        job = self._open.pop(message.request_id)
        assert message.epoch == job.epoch and message.num_tokens == len(job.answer), (message, job)
        self._blocked = False
        self.counters.preempted += 1
        self._return(job)

    def _reject(self, message: Rejected) -> None:
        job = self._open.pop(message.request_id)
        assert message.reason is RejectReason.NO_TOKENS, message
        assert self._open, f"refused although nothing runs: {message}"
        self._blocked = True
        self.counters.refused += 1
        self._return(job)

    def _return(self, job: Job) -> None:
        if job.cancelled:
            # The abort met a request that was gone, so that no end of it will be reported.
            self._end(job)
        else:
            self._queue.appendleft(job)
