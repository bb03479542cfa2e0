"""A worker's wire whose verbs come at fixed turns of the loop, seeded and without sleeping."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mlx_dp.proto.messages.protocol import (
    Accepted,
    Down,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Ready,
    Rejected,
    Shutdown,
    Start,
    Submit,
    Tokens,
    Up,
)


@dataclass(slots=True)
class Received:
    """All that a worker said about one request."""

    ids: list[int] = field(default_factory=list)
    finished: Finished | None = None


class ScriptedChannel:
    """Sends ``start``, then each verb at its turn, and Shutdown when every request has ended."""

    def __init__(self, start: Start, script: list[tuple[int, Down]]) -> None:
        self._start: Start | None = start
        self._script: Iterator[tuple[int, Down]] = iter(sorted(script, key=lambda entry: entry[0]))
        self._next = next(self._script, None)
        self._turn = 0
        self._open: set[int] = set()
        self.received: dict[int, Received] = {}
        self.ready: Ready | None = None
        self.most_at_once = 0
        self.congested = False
        self.malformed_frames = 0

    def drain(self) -> list[Down]:
        if self._start is not None:
            start, self._start = self._start, None
            return [start]
        self._turn += 1
        due: list[Down] = []
        while self._next is not None and (self._next[0] <= self._turn or not self._open):
            verb = self._next[1]
            due.append(verb)
            if isinstance(verb, Submit):
                self._open.add(verb.request_id)
                self.received[verb.request_id] = Received()
            self._next = next(self._script, None)
        if not due and not self._open and self._next is None:
            return [Shutdown()]
        self.most_at_once = max(self.most_at_once, len(self._open))
        return due

    def send(self, message: Up) -> None:
        match message:
            case Tokens(chunks=chunks):
                for chunk in chunks:
                    known = self.received[chunk.request_id]
                    assert chunk.index == len(known.ids), chunk
                    known.ids += chunk.ids
            case Finished(request_id=request):
                self.received[request].finished = message
                self._open.remove(request)
            case Rejected() | Failed():
                raise AssertionError(message)
            case Ready():
                self.ready = message
            case Hello() | Accepted() | Heartbeat():
                pass

    def wait(self, timeout_s: float) -> bool:
        return True
