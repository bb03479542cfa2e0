"""The controller's side of the wire, for one scenario: grants, aborts, replays, and a flush."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_dp.proto.messages.commands import Down, Flush, Shutdown, Start, Submit
from mlx_dp.proto.messages.events import (
    Failed,
    Finished,
    FinishReason,
    Heartbeat,
    Preempted,
    Ready,
    Rejected,
    RejectReason,
    Up,
)
from mlx_dp.proto.messages.sampling_params import SamplingParams
from tests.support.conformance.scenario import Ask
from tests.support.worker.fake_controller import FakeController, Request

MAX_TURNS = 20_000
GREEDY = SamplingParams(temperature=0.0)
TICK_S = 0.001


@dataclass(slots=True)
class Answer:
    """The response to one ask."""

    ask: Ask
    request: Request | None = None
    """None until it is granted for the first time."""
    submitted_at: int = 0
    """The loop run of the last grant."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The submitted prompt, with earlier turns of the chat."""
        return () if self.request is None else self.request.submit.prompt_ids

    @property
    def ids(self) -> list[int]:
        return [] if self.request is None else self.request.ids

    @property
    def cached_tokens(self) -> int | None:
        """Of the first grant: later ones hit prefixes of the earlier ones."""
        cached = [] if self.request is None else self.request.cached_tokens
        return cached[0] if cached else None

    @property
    def finished(self) -> Finished | None:
        return None if self.request is None else self.request.finished


class Client:
    """A channel with a clock. It holds at most ``at_once`` requests open.

    As the controller does, it returns preempted requests, and those without memory, to the
    front of its queue. When all have ended it flushes the cache, waits until the worker is
    idle, and shuts it down.
    """

    def __init__(self, start: Start, asks: Sequence[Ask], *, at_once: int) -> None:
        self._start: Start | None = start
        self._at_once = at_once
        self._turn = 0
        self._now = 0.0
        self._waiting: deque[int] = deque()
        self._coming = list(range(len(asks)))
        self._flush_sent = False
        self._controller = FakeController(self._put_back)
        self.answers = [Answer(ask) for ask in asks]
        self.congested = False
        self.malformed_frames = 0

    @property
    def ready(self) -> Ready | None:
        return self._controller.ready

    @property
    def failed(self) -> Failed | None:
        return self._controller.failed

    @property
    def idle(self) -> Heartbeat | None:
        """The heartbeat of the worker after its cache was flushed."""
        return None if self._controller.flushed is None else self._controller.heartbeat

    @property
    def preempted(self) -> int:
        return self._controller.preempted

    @property
    def most_together(self) -> int:
        return self._controller.most_together

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
        running = self._controller.open
        assert self._turn < MAX_TURNS, f"stuck, with {sorted(running)} open"
        self._arrive()
        commands: list[Down] = [*self._grants(), *self._aborts()]
        if commands or running or self._waiting or self._coming:
            return commands
        if not self._flush_sent:
            self._flush_sent = True
            flush = Flush(flush_id=1)
            self._controller.sent(flush)
            return [flush]
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
        while self._waiting and len(self._controller.open) < slots:
            grants.append(self._grant(self._waiting.popleft()))
        return grants

    def _grant(self, index: int) -> Submit:
        answer = self.answers[index]
        if answer.request is None:
            answer.request = Request(self._submit(index, answer.ask))
        answer.submitted_at = self._turn
        return self._controller.grant(answer.request)

    def _submit(self, index: int, ask: Ask) -> Submit:
        return Submit(
            request_id=index,
            epoch=0,
            prompt_ids=self._prompt(ask),
            max_tokens=ask.max_tokens,
            params=GREEDY,
            cache_salt=ask.salt,
        )

    def _prompt(self, ask: Ask) -> tuple[int, ...]:
        if not ask.continues:
            return ask.prompt
        assert ask.after is not None
        before = self.answers[ask.after]
        return (*before.prompt, *before.ids, *ask.prompt)

    def _aborts(self) -> list[Down]:
        aborts: list[Down] = []
        for index, request in sorted(self._controller.open.items()):
            if request.aborted_epoch is None and self._wants_abort(self.answers[index]):
                aborts.append(request.abort)
                self._controller.sent(request.abort)
        return aborts

    def _wants_abort(self, answer: Answer) -> bool:
        ask = answer.ask
        enough = ask.abort_tokens is not None and len(answer.ids) >= ask.abort_tokens
        late = ask.abort_turns is not None and self._turn >= answer.submitted_at + ask.abort_turns
        return enough or late

    def send(self, message: Up) -> None:
        self._controller.receive(message)
        if isinstance(message, Finished):
            # No ask has stop tokens.
            assert message.reason in (FinishReason.LENGTH, FinishReason.ABORT), message

    def _put_back(self, request: Request, message: Preempted | Rejected) -> None:
        if isinstance(message, Rejected):
            # On an idle worker it must be accepted: no other request would free memory.
            assert message.reason is RejectReason.NO_TOKENS and self._controller.open, message
        self._waiting.appendleft(request.request_id)
