"""An in-memory control plane with scripted responses, for tests of the HTTP side."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from mlx_dp.orchestrator.api import (
    Ended,
    FlushOutcome,
    Generation,
    Granted,
    NewTokens,
    OverloadedError,
    OwnerFlush,
    OwnerState,
    ResponseStream,
    ServiceState,
    ServiceStatus,
    Started,
    StreamEvent,
)
from mlx_dp.orchestrator.control.requests.admission import certain_max_tokens
from mlx_dp.orchestrator.control.state.counters import Counters
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.service_counters import ControllerCounters, RequestObserver
from mlx_dp.orchestrator.worker_states import RestartRefusedError, WorkerState
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.owner_states import READY

API_KEY = "sk-tëst"
OPTIONS = HttpOptions(served_model_name="demo/fake")
STATE = ServiceState(
    status=ServiceStatus.READY,
    mode=ReplicaMode.DATA_PARALLEL,
    load_balance_method="total_tokens",
    tp_size=1,
    queued_requests=0,
    queued_tokens=0,
    max_queued_requests=16,
    owners=(READY, replace(READY, dp_rank=1)),
)


def granted(owner: int = 0, reason: str = "least") -> Granted:
    return Granted(dp_rank=owner, reason=reason)


def says(text: str, reason: FinishReason = FinishReason.STOP, owner: int = 0) -> list[StreamEvent]:
    """Events of a response, a byte at a time, in the fake tokenizer's ids."""
    tokens = [NewTokens(ids=(byte,)) for byte in text.encode()]
    if reason is FinishReason.STOP:
        tokens.append(NewTokens(ids=(256,)))
    return [granted(owner), Started(cached_tokens=0), *tokens, Ended(reason=reason)]


class ScriptedAnswer:
    """A stream of given events, which ends as aborted when it is cancelled before its end."""

    def __init__(self, request_id: int, generation: Generation) -> None:
        self.request_id = request_id
        self.generation = generation
        self.cancelled = asyncio.Event()
        self.completed = False
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._ended = False

    def feed(self, events: Iterable[StreamEvent]) -> None:
        for event in events:
            self._events.put_nowait(event)

    def cancel(self) -> None:
        if not self.cancelled.is_set() and not self._ended:
            self.cancelled.set()
            self.feed([Ended(reason=FinishReason.ABORT)])

    def complete(self) -> None:
        self.completed = True
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        while True:
            event = await self._events.get()
            if isinstance(event, Ended):
                self._ended = True
            yield event
            if isinstance(event, Ended):
                return


class ScriptedService:
    """Answers each generation with ``reply``, and admits requests as the real one does."""

    def __init__(
        self,
        reply: Callable[[Generation], Iterable[StreamEvent]] = lambda _: says("Hello, wörld 😀!"),
        owners: tuple[OwnerState, ...] = STATE.owners,
    ) -> None:
        self.reply = reply
        self.answers: list[ScriptedAnswer] = []
        self.current = replace(STATE, owners=owners)
        self.bounds: AdmissionLimits | None = AdmissionLimits(context_length=512, pool_tokens=1000)
        self.strict_max_tokens = False
        self.refuse_from: int | None = None
        self.totals = Counters()
        self.flushes = tuple(
            OwnerFlush(dp_rank=owner, outcome=FlushOutcome.FLUSHED, num_tokens=10, nbytes=640)
            for owner in range(len(owners))
        )
        self.restarting: tuple[int, ...] = ()
        self.hosts: dict[int, str | None] = {}
        self.observers: list[RequestObserver] = []
        self.submitted = asyncio.Event()

    def state(self) -> ServiceState:
        return self.current

    def limits(self) -> AdmissionLimits | None:
        return self.bounds

    def counters(self) -> ControllerCounters:
        return self.totals.snapshot(unknown_frames=0)

    async def flush_cache(self, timeout_s: float) -> tuple[OwnerFlush, ...]:
        return self.flushes

    def workers(self) -> tuple[WorkerState, ...]:
        return tuple(
            WorkerState(
                index=owner.dp_rank,
                status=owner.status,
                status_s=60.0,
                phase=owner.phase,
                pid=owner.pid,
                incarnation=owner.incarnation,
                epoch=owner.restarts,
                restarts=owner.restarts,
                restarts_in_window=owner.restarts,
                max_restarts=5,
                last_cause=owner.message,
                restart_asked=owner.dp_rank in self.restarting,
                malformed_frames=0,
                host=self.hosts.get(owner.dp_rank, ""),
                batching=owner.batching,
                unbatched_reason="no batch" if owner.batching is Batching.ONE_BY_ONE else "",
            )
            for owner in self.current.owners
        )

    def restart_worker(self, index: int) -> tuple[int, ...]:
        if self.restarting:
            raise RestartRefusedError("a restart is under way already")
        self.restarting = (index,)
        return self.restarting

    def observe(self, observer: RequestObserver) -> None:
        self.observers.append(observer)

    def submit(self, generation: Generation) -> ResponseStream:
        if self.refuse_from is not None and len(self.answers) >= self.refuse_from:
            raise OverloadedError("the queue is full", status=429, retry_after_s=3)
        if self.bounds is not None:
            certain_max_tokens(generation, self.bounds, strict=self.strict_max_tokens)
        answer = ScriptedAnswer(len(self.answers), generation)
        answer.feed(self.reply(generation))
        self.answers.append(answer)
        self.submitted.set()
        return answer

    @property
    def generation(self) -> Generation:
        """The only generation so far."""
        assert len(self.answers) == 1, len(self.answers)
        return self.answers[0].generation
