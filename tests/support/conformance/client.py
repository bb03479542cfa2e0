"""The controller's side of the wire, for one scenario: grants, aborts, replays, and a flush."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from mlx_dp.proto.messages.protocol import (
    Abort,
    Accepted,
    Down,
    Failed,
    Finished,
    FinishReason,
    Flush,
    Flushed,
    Heartbeat,
    Hello,
    Preempted,
    Prefilled,
    Ready,
    Rejected,
    RejectReason,
    Shutdown,
    Start,
    Submit,
    Tokens,
    Up,
)
from mlx_dp.proto.messages.sampling_params import SamplingParams
from tests.support.conformance.scenario import Ask

MAX_TURNS = 20_000
GREEDY = SamplingParams(temperature=0.0)
TICK_S = 0.001


@dataclass(slots=True)
class Answer:
    """What came back for one ask. ``prompt`` is what was submitted, earlier turns included."""

    ask: Ask
    prompt: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    epoch: int = 0
    submitted_at: int | None = None
    abort_sent: bool = False
    cached_tokens: int | None = None
    """Of the first grant: later ones find what the earlier ones left."""
    prefilled: bool = False
    finished: Finished | None = None


class Client:
    """A channel with a clock. It holds no more than ``at_once`` requests open.

    As the controller does, it puts what was preempted or found no room back to the front of its
    queue. When all have ended it flushes the cache, sees the worker idle, and shuts it down.
    ``most_together`` is the largest number of requests that drew a token in one step.
    """

    def __init__(self, start: Start, asks: Sequence[Ask], *, at_once: int) -> None:
        self._start: Start | None = start
        self._at_once = at_once
        self._turn = 0
        self._now = 0.0
        self._waiting: deque[int] = deque()
        self._coming = list(range(len(asks)))
        self._open: set[int] = set()
        self._flush_sent = False
        self.answers = [Answer(ask) for ask in asks]
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.flushed: Flushed | None = None
        self.idle: Heartbeat | None = None
        self.most_together = 0
        self.preempted = 0
        self.congested = False
        self.malformed_frames = 0

    def clock(self) -> float:
        self._now += TICK_S
        return self._now

    def wait(self, timeout_s: float) -> bool:
        self._now += timeout_s
        return True

    def drain(self) -> list[Down]:
        if self._start is not None:
            start, self._start = self._start, None
            return [start]
        if self.ready is None:
            return []
        self._turn += 1
        assert self._turn < MAX_TURNS, f"stuck, with {sorted(self._open)} open"
        self._arrive()
        verbs: list[Down] = [*self._grants(), *self._aborts()]
        if verbs or self._open or self._waiting or self._coming:
            return verbs
        if not self._flush_sent:
            self._flush_sent = True
            return [Flush(flush_id=1)]
        return [Shutdown()] if self.idle is not None else []

    def _arrive(self) -> None:
        due = [index for index in self._coming if self._due(self.answers[index].ask)]
        self._coming = [index for index in self._coming if index not in due]
        self._waiting.extend(due)

    def _due(self, ask: Ask) -> bool:
        ended = ask.after is None or self.answers[ask.after].finished is not None
        return ended and self._turn > ask.turn

    def _grants(self) -> list[Down]:
        assert self.ready is not None
        slots = min(self._at_once, self.ready.capacity.request_slots)
        grants: list[Down] = []
        while self._waiting and len(self._open) < slots:
            grants.append(self._grant(self._waiting.popleft()))
        return grants

    def _grant(self, index: int) -> Submit:
        answer = self.answers[index]
        if not answer.epoch:
            answer.prompt = self._prompt(answer.ask)
        answer.epoch += 1
        answer.prefilled = False
        answer.submitted_at = self._turn
        self._open.add(index)
        return Submit(
            request_id=index,
            epoch=answer.epoch,
            prompt_ids=answer.prompt,
            output_ids=tuple(answer.ids),
            max_tokens=answer.ask.max_tokens,
            params=GREEDY,
            cache_salt=answer.ask.salt,
        )

    def _prompt(self, ask: Ask) -> tuple[int, ...]:
        if not ask.continues:
            return ask.prompt
        assert ask.after is not None
        before = self.answers[ask.after]
        return (*before.prompt, *before.ids, *ask.prompt)

    def _aborts(self) -> list[Down]:
        aborts: list[Down] = []
        for index in sorted(self._open):
            answer = self.answers[index]
            if not answer.abort_sent and self._wants_abort(answer):
                answer.abort_sent = True
                aborts.append(Abort(request_id=index, epoch=answer.epoch))
        return aborts

    def _wants_abort(self, answer: Answer) -> bool:
        ask = answer.ask
        enough = ask.abort_tokens is not None and len(answer.ids) >= ask.abort_tokens
        assert answer.submitted_at is not None
        late = ask.abort_turns is not None and self._turn >= answer.submitted_at + ask.abort_turns
        return enough or late

    def send(self, message: Up) -> None:
        match message:
            case Tokens():
                self._take(message)
            case Prefilled():
                self._prefilled(message)
            case Finished():
                self._finish(message)
            case Preempted(request_id=request):
                assert message.num_tokens == len(self._granted(message).ids), message
                self.preempted += 1
                self._put_back(request)
            case Rejected(request_id=request):
                self._granted(message)
                # Alone it must be taken: there is nothing that it could wait for.
                assert message.reason is RejectReason.NO_TOKENS and len(self._open) > 1, message
                self._put_back(request)
            case Ready():
                self.ready = message
            case Failed():
                self.failed = message
            case Flushed():
                self.flushed = message
            case Heartbeat():
                self.idle = message if self.flushed is not None else None
            case Hello() | Accepted():
                pass
            case _:
                assert_never(message)

    def _granted(self, message: Prefilled | Finished | Preempted | Rejected) -> Answer:
        answer = self.answers[message.request_id]
        assert message.request_id in self._open, message
        assert message.epoch == answer.epoch, message
        return answer

    def _take(self, tokens: Tokens) -> None:
        self.most_together = max(self.most_together, len(tokens.chunks))
        for chunk in tokens.chunks:
            answer = self.answers[chunk.request_id]
            assert chunk.epoch == answer.epoch, chunk
            assert answer.prefilled, f"tokens before Prefilled: {chunk}"
            assert chunk.index == len(answer.ids), chunk
            answer.ids += chunk.ids

    def _prefilled(self, message: Prefilled) -> None:
        answer = self._granted(message)
        assert not answer.prefilled, f"a second Prefilled: {message}"
        answer.prefilled = True
        if answer.cached_tokens is None:
            answer.cached_tokens = message.cached_tokens

    def _finish(self, message: Finished) -> None:
        answer = self._granted(message)
        assert message.num_tokens == len(answer.ids), message
        whole = len(answer.ids) == answer.ask.max_tokens
        reason = FinishReason.LENGTH if whole else FinishReason.ABORT
        assert message.reason is reason, message
        assert whole or answer.abort_sent, message
        answer.finished = message
        self._open.remove(message.request_id)

    def _put_back(self, request: int) -> None:
        self._open.remove(request)
        self._waiting.appendleft(request)
