"""Response streams: buffer the events of each request for its client."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Protocol

from mlx_dp.orchestrator.api import Ended, Granted, NewTokens, Started, StreamEvent
from mlx_dp.orchestrator.control.state.counters import Counters
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.service_counters import RequestObserver, RequestTimings
from mlx_dp.proto.messages.events import FinishReason, TokenChunk, TokenLogprob

_logger = logging.getLogger(__name__)


class RequestEnder(Protocol):
    """Ends requests for their streams. Both methods also free the request's slot."""

    def cancel(self, request_id: int) -> None: ...

    def complete(self, request_id: int) -> None: ...


class BufferedStream:
    """The events of one request, for one reader.

    Tokens that arrive faster than they are read are joined into one event, so a slow reader costs
    one wake-up, and no more memory than the output itself.
    """

    __slots__ = ("_ended", "_ender", "_events", "_ids", "_logprobs", "_request_id", "_waiter")

    def __init__(self, request_id: int, ender: RequestEnder) -> None:
        self._request_id: Final = request_id
        self._ender: Final = ender
        self._events: Final[deque[StreamEvent]] = deque()
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> int:
        return self._request_id

    def cancel(self) -> None:
        """End the request as ABORT: the client is gone. Idempotent, in every state."""
        if not self._ended:
            self._ender.cancel(self._request_id)

    def complete(self) -> None:
        """End the request as STOP: the client has enough. Idempotent, in every state."""
        if not self._ended:
            self._ender.complete(self._request_id)

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        while (event := self.poll()) is None:
            if self._ended:
                raise StopAsyncIteration
            assert self._waiter is None, f"request {self._request_id} has two readers"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return event

    def poll(self) -> StreamEvent | None:
        """Remove and return the next event, or None if there is none yet."""
        if not self._events:
            self._join()
        return self._events.popleft() if self._events else None

    def push(self, event: StreamEvent) -> None:
        """Add an event other than tokens, in its order among them."""
        assert not self._ended, f"request {self._request_id}: {event} after its end"
        self._join()
        self._events.append(event)
        self._ended = isinstance(event, Ended)
        self._wake()

    def push_tokens(self, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """Add tokens after everything that is there."""
        assert not self._ended, f"request {self._request_id}: tokens after its end"
        self._ids += ids
        self._logprobs += logprobs
        self._wake()

    def _join(self) -> None:
        if self._ids:
            self._events.append(NewTokens(ids=tuple(self._ids), logprobs=tuple(self._logprobs)))
            self._ids = []
            self._logprobs = []

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OpenStreams:
    """The open response streams: one per request in the table, closed exactly once.

    Also counts requests, and notifies the observers.
    """

    def __init__(self, counters: Counters, ender: RequestEnder) -> None:
        self._counters: Final = counters
        self._ender: Final = ender
        self._streams: Final[dict[int, BufferedStream]] = {}
        self._observers: Final[list[RequestObserver]] = []

    def __len__(self) -> int:
        return len(self._streams)

    def observe(self, observer: RequestObserver) -> None:
        self._observers.append(observer)

    def open(self, entry: RequestEntry) -> BufferedStream:
        """Open the stream of a new request."""
        stream = BufferedStream(entry.request_id, self._ender)
        self._streams[entry.request_id] = stream
        self._counters.requests_started += 1
        return stream

    def granted(self, entry: RequestEntry, dp_rank: int, reason: str) -> None:
        """Report a grant. A request that is requeued is granted again."""
        self._counters.grants[reason] += 1
        self._streams[entry.request_id].push(Granted(dp_rank=dp_rank, reason=reason))

    def withdrawn(self) -> None:
        """Count a withdrawn grant, which clients do not notice."""
        self._counters.grants_withdrawn += 1

    def replayed(self) -> None:
        """Count a request that was requeued after its owner had accepted it."""
        self._counters.requests_replayed += 1

    def started(self, entry: RequestEntry, dp_rank: int) -> None:
        """Report that a prompt was prefilled for the first time; replays are not reported."""
        assert entry.granted_at is not None, f"request {entry.request_id} has no grant"
        assert entry.cached_tokens is not None, f"request {entry.request_id} is not prefilled"
        for observer in self._observers:
            observer.started(entry.granted_at - entry.queued_at)
        self._counters.prompt_by_owner[dp_rank] += len(entry.generation.prompt_ids)
        self._counters.cached_by_owner[dp_rank] += entry.cached_tokens
        self._streams[entry.request_id].push(Started(cached_tokens=entry.cached_tokens))

    def tokens(self, entry: RequestEntry, chunk: TokenChunk, *, before: float | None) -> None:
        """Pass on tokens. ``before``: the time of the previous ones; None for the first."""
        assert entry.last_token_at is not None, f"request {entry.request_id} has no tokens"
        for observer in self._observers:
            if before is None:
                observer.first_token(entry.last_token_at - entry.queued_at)
            else:
                observer.next_tokens(entry.last_token_at - before)
        self._streams[entry.request_id].push_tokens(chunk.ids, chunk.logprobs)

    def end(self, entry: RequestEntry, ended: Ended, now: float) -> None:
        """Close the stream, count the request and notify the observers."""
        self._streams.pop(entry.request_id).push(ended)
        self._counters.ended(ended.reason, ended.code)
        if ended.reason is FinishReason.ERROR:
            _logger.warning(
                "request %s (%r): %s after %s tokens: %s",
                *(entry.request_id, entry.generation.label[:128], ended.code),
                *(len(entry.emitted), ended.message),
            )
        if self._observers:
            timings = _timings(entry, ended, now)
            for observer in self._observers:
                observer.ended(timings)

    def check(self, entries: set[int]) -> None:
        """Assert that the open streams are those of these requests."""
        assert self._streams.keys() == entries, self._streams.keys() ^ entries


def _timings(entry: RequestEntry, ended: Ended, now: float) -> RequestTimings:
    def since(time: float | None) -> float | None:
        return None if time is None else time - entry.queued_at

    return RequestTimings(
        reason=ended.reason,
        code=ended.code,
        prompt_tokens=len(entry.generation.prompt_ids),
        output_tokens=len(entry.emitted),
        cached_tokens=entry.cached_tokens or 0,
        dp_rank=entry.last_dp_rank,
        granted_s=since(entry.granted_at),
        first_token_s=since(entry.first_token_at),
        last_token_s=since(entry.last_token_at),
        ended_s=now - entry.queued_at,
    )
