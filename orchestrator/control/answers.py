"""The events of one request, from the controller to whoever reads its answer."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from mlx_dp.orchestrator.service import AnswerEvent, Ended, NewTokens
from mlx_dp.proto.messages import FinishReason, TokenLogprob


class RequestAnswer:
    """One answer, read by one reader.

    Tokens that arrive faster than they are read are joined into one event, so that a slow reader
    costs one wake-up, and no more memory than the answer itself.
    """

    __slots__ = ("_ended", "_events", "_ids", "_leave", "_logprobs", "_request_id", "_waiter")

    def __init__(self, request_id: int, leave: Callable[[int, FinishReason], None]) -> None:
        self._request_id: Final = request_id
        self._leave: Final = leave
        self._events: Final[deque[AnswerEvent]] = deque()
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> int:
        return self._request_id

    def cancel(self) -> None:
        """Say that nobody wants the rest. Idempotent, in every state; the slot is freed."""
        if not self._ended:
            self._leave(self._request_id, FinishReason.ABORT)

    def complete(self) -> None:
        """Like ``cancel``, but the client has all it asked for: the answer ends as STOP."""
        if not self._ended:
            self._leave(self._request_id, FinishReason.STOP)

    def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        return self

    async def __anext__(self) -> AnswerEvent:
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

    def poll(self) -> AnswerEvent | None:
        """The next event if it is at hand."""
        if not self._events:
            self._join()
        return self._events.popleft() if self._events else None

    def push(self, event: AnswerEvent) -> None:
        """Add an event other than tokens, in its order among them."""
        assert not self._ended, f"request {self._request_id}: {event} after its end"
        self._join()
        self._events.append(event)
        self._ended = isinstance(event, Ended)
        self._wake()

    def push_tokens(self, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """Add tokens behind everything that is there."""
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
