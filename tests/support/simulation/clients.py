"""The clients of one run: they send requests, read at their own pace, and some leave."""

from collections.abc import Callable
from functools import cached_property

from mlx_dp.orchestrator.api import Ended, NewTokens, OverloadedError, RefusedError, Started
from mlx_dp.orchestrator.control.core import ControlCore
from mlx_dp.orchestrator.control.requests.response_stream import BufferedStream
from mlx_dp.proto.messages.events import FinishReason
from mlx_dp.worker.fake.tokens import FakeAnswer
from tests.support.simulation.schedule import VOCAB_SIZE, Arrival

ACCEPTABLE = frozenset({"request_crashed_worker", "worker_lost", "no_worker", "worker_failed"})
"""The allowed errors of a response; a time-out would mean that something was stuck."""


class Client:
    """One client. Everything that it reads must be a prefix of the undisturbed response."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.answer: BufferedStream | None = None
        self.num_tokens = 0
        self.starts = 0
        self.cached_tokens: int | None = None
        self.ended: Ended | None = None
        self.left = False
        self.turned_away = False
        self.overload: OverloadedError | None = None

    @cached_property
    def wanted(self) -> list[int]:
        """The response of any worker to this request, without faults."""
        generation = self.arrival.generation
        assert generation.max_tokens is not None
        whole = FakeAnswer(0, VOCAB_SIZE, generation.prompt_ids, generation.params)
        ids: list[int] = []
        for position in range(generation.max_tokens):
            ids.append(whole.token(position))
            if ids[-1] in generation.stop_token_ids:
                break
        return ids

    @property
    def asked(self) -> bool:
        return self.turned_away or self.answer is not None

    @property
    def open(self) -> bool:
        return self.answer is not None and self.ended is None

    def ask(self, core: ControlCore) -> None:
        try:
            self.answer = core.submit(self.arrival.generation)
        except OverloadedError as overload:
            self.turned_away = True
            self.overload = overload
        except RefusedError:
            self.turned_away = True
            assert self.arrival.refused, self.arrival
        else:
            assert not self.arrival.refused, f"accepted: {self.arrival}"

    def read(self, leave: Callable[["Client"], None]) -> None:
        """Read all events so far; ``leave`` is called once the client has read enough."""
        if self.answer is None:
            return
        while (event := self.answer.poll()) is not None:
            assert self.ended is None, f"I3: {event} after {self.ended}"
            match event:
                case NewTokens(ids=ids):
                    wanted = self.wanted[self.num_tokens : self.num_tokens + len(ids)]
                    assert list(ids) == wanted, f"I4: {ids} at {self.num_tokens}, not {wanted}"
                    self.num_tokens += len(ids)
                case Started(cached_tokens=cached_tokens):
                    self.starts += 1
                    assert self.starts == 1, "I8: it starts twice"
                    assert not self.num_tokens, f"I4: {event} after {self.num_tokens} tokens"
                    assert cached_tokens <= len(self.arrival.generation.prompt_ids), event
                    self.cached_tokens = cached_tokens
                case Ended():
                    self.ended = event
                    self._verify_end(event)
                case _:
                    pass
        enough = self.arrival.leaves_after
        if self.open and not self.left and enough is not None and self.num_tokens >= enough:
            leave(self)

    def leave(self) -> None:
        """Cancel the response: in every state, and repeatedly."""
        if self.answer is None:
            return
        self.left |= self.ended is None
        if self.arrival.content:
            self.answer.complete()
        else:
            self.answer.cancel()

    def _verify_end(self, ended: Ended) -> None:
        if self.left and ended.reason in (FinishReason.ABORT, FinishReason.STOP):
            return
        whole = self.num_tokens == len(self.wanted)
        match ended.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                stopped = self.wanted[-1] in self.arrival.generation.stop_token_ids
                assert whole, f"I4: {ended} after {self.num_tokens} of {len(self.wanted)}"
                assert stopped == (ended.reason is FinishReason.STOP), ended
            case FinishReason.ABORT:
                raise AssertionError(f"I3: aborted unasked: {ended}")
            case FinishReason.ERROR if ended.code == "rejected_invalid":
                assert self.arrival.unservable and ended.status == 400, f"I16: {ended}"
            case FinishReason.ERROR:
                assert ended.code in ACCEPTABLE, f"I3: {ended}"
