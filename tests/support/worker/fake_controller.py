"""The controller of one worker: its grants, the events it received, and checks of both.

Without a wire: a test gives it each command that it sends, and each event that the worker sends.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import assert_never

from mlx_dp.proto.messages.commands import Abort, Down, Drain, Flush, Shutdown, Start, Submit
from mlx_dp.proto.messages.events import (
    Accepted,
    Failed,
    Finished,
    FinishReason,
    Flushed,
    Heartbeat,
    Hello,
    Preempted,
    Prefilled,
    Ready,
    Rejected,
    Tokens,
    Up,
)


@dataclass(slots=True, eq=False)
class Request:
    """One request over all its grants.

    ``ids`` is its output, and ``epoch`` is of the last grant. ``submit`` is the request; its
    epoch and the output so far are filled in for each grant.
    """

    submit: Submit
    ids: list[int] = field(default_factory=list)
    epoch: int = 0
    aborted_epoch: int | None = None
    accepted: bool = False
    prefilled: bool = False
    cached_tokens: list[int] = field(default_factory=list)
    """Of each grant whose prompt was prefilled."""
    finished: Finished | None = None

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def grant(self) -> Submit:
        return replace(self.submit, epoch=self.epoch, output_ids=tuple(self.ids))

    @property
    def abort(self) -> Abort:
        return Abort(request_id=self.request_id, epoch=self.epoch)


PutBack = Callable[[Request, Preempted | Rejected], None]


def unexpected(request: Request, message: Preempted | Rejected) -> None:
    """For workers with room for all of their requests."""
    raise AssertionError(message)


class FakeController:
    """Asserts that every event is consistent with those before it.

    ``put_back`` gets each request that the worker returned unfinished, and decides when it is
    granted again. With ``errors`` a request may end with one.
    """

    def __init__(self, put_back: PutBack = unexpected, *, errors: bool = False) -> None:
        self._put_back = put_back
        self._errors = errors
        self._flushes: deque[int] = deque()
        self.requests: dict[int, Request] = {}
        self.open: dict[int, Request] = {}
        """Granted, and not returned."""
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.flushed: Flushed | None = None
        self.heartbeat: Heartbeat | None = None
        """The last one; after ``flushed``, only one since that."""
        self.preempted = 0
        self.most_together = 0
        """The largest number of requests that drew a token in one step."""

    def grant(self, request: Request) -> Submit:
        """Grant the request again; return its command."""
        assert request.request_id not in self.open, request
        assert request.finished is None, request
        request.epoch += 1
        request.accepted = request.prefilled = False
        self.requests[request.request_id] = self.open[request.request_id] = request
        return request.grant

    def forget(self, request: Request) -> None:
        """Forget a request that is not open, for tests with many requests."""
        assert request.request_id not in self.open, request
        self.requests.pop(request.request_id, None)

    def sent(self, command: Down) -> None:
        """Record a command; each ``Submit`` here is a new request, already begun elsewhere."""
        match command:
            case Submit():
                begun = list(command.output_ids)
                granted = self.grant(Request(command, begun, epoch=command.epoch - 1))
                assert granted == command
            case Abort():
                self.requests[command.request_id].aborted_epoch = command.epoch
            case Flush():
                self._flushes.append(command.flush_id)
            case Start() | Drain() | Shutdown():
                pass
            case _:
                assert_never(command)

    def receive(self, message: Up) -> None:
        """Check and record an event."""
        match message:
            case Accepted():
                self._accept(message)
            case Prefilled():
                self._prefill(message)
            case Tokens():
                self._extend(message)
            case Finished():
                self._finish(message)
            case Preempted():
                request = self._running(message)
                assert message.num_tokens == len(request.ids), (message, request)
                self.preempted += 1
                self._give_back(request, message)
            case Rejected():
                request = self._granted(message)
                assert not request.accepted, (message, request)
                self._give_back(request, message)
            case Flushed():
                assert self._flushes and message.flush_id == self._flushes.popleft(), message
                self.flushed, self.heartbeat = message, None
            case Heartbeat():
                self.heartbeat = message
            case Ready():
                self.ready = message
            case Failed():
                self.failed = message
            case Hello():
                pass
            case _:
                assert_never(message)

    def _granted(self, message: Accepted | Prefilled | Finished | Preempted | Rejected) -> Request:
        assert message.request_id in self.open, f"not granted: {message}"
        request = self.open[message.request_id]
        assert message.epoch == request.epoch, (message, request)
        return request

    def _running(self, message: Prefilled | Finished | Preempted) -> Request:
        request = self._granted(message)
        assert request.accepted, f"before Accepted: {message}"
        return request

    def _accept(self, message: Accepted) -> None:
        request = self._granted(message)
        assert not request.accepted, f"a second Accepted: {message}"
        request.accepted = True

    def _prefill(self, message: Prefilled) -> None:
        request = self._running(message)
        assert not request.prefilled, f"a second Prefilled: {message}"
        prompt = len(request.submit.prompt_ids) + len(request.ids)
        assert message.cached_tokens < prompt, (message, prompt)
        request.prefilled = True
        request.cached_tokens.append(message.cached_tokens)

    def _extend(self, message: Tokens) -> None:
        self.most_together = max(self.most_together, len(message.chunks))
        for chunk in message.chunks:
            assert chunk.request_id in self.open, f"not granted: {chunk}"
            request = self.open[chunk.request_id]
            assert chunk.epoch == request.epoch, (chunk, request)
            assert request.prefilled, f"tokens before Prefilled: {chunk}"
            assert chunk.index == len(request.ids), (chunk, request)
            request.ids += chunk.ids
            assert len(request.ids) <= request.submit.max_tokens, request

    def _finish(self, message: Finished) -> None:
        request = self._running(message)
        assert message.num_tokens == len(request.ids), (message, request)
        whole = len(request.ids) == request.submit.max_tokens
        match message.reason:
            case FinishReason.LENGTH:
                assert whole, (message, request)
            case FinishReason.STOP:
                assert request.ids[-1] in request.submit.stop_token_ids, (message, request)
            case FinishReason.ABORT:
                assert request.aborted_epoch == request.epoch and not whole, (message, request)
            case FinishReason.ERROR:
                assert self._errors, message
            case _:
                assert_never(message.reason)
        request.finished = message
        del self.open[message.request_id]

    def _give_back(self, request: Request, message: Preempted | Rejected) -> None:
        del self.open[message.request_id]
        self._put_back(request, message)
