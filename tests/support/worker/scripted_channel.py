"""A worker's wire whose commands come at fixed loop runs, seeded and without sleeping."""

from collections.abc import Iterator

from mlx_dp.proto.messages.commands import Down, Shutdown, Start
from mlx_dp.proto.messages.events import Preempted, Rejected, Up
from tests.support.worker.fake_controller import FakeController, Request, unexpected


class ScriptedChannel:
    """Sends ``start``, each command at its loop run, and Shutdown when every request has ended.

    ``controller`` has the worker's events about each request, in ``received``.
    """

    def __init__(
        self, start: Start, script: list[tuple[int, Down]], *, errors: bool = False
    ) -> None:
        self._start: Start | None = start
        self._script: Iterator[tuple[int, Down]] = iter(sorted(script, key=lambda entry: entry[0]))
        self._next = next(self._script, None)
        self._turn = 0
        self.controller = FakeController(self.put_back, errors=errors)
        self.received = self.controller.requests
        self.most_at_once = 0
        self.congested = False
        self.malformed_frames = 0

    def put_back(self, request: Request, message: Preempted | Rejected) -> None:
        unexpected(request, message)

    def drain(self) -> list[Down]:
        if self._start is not None:
            start, self._start = self._start, None
            return [start]
        self._turn += 1
        due: list[Down] = []
        running = self.controller.open
        while self._next is not None and (self._next[0] <= self._turn or not running):
            due.append(self._next[1])
            self.controller.sent(self._next[1])
            self._next = next(self._script, None)
        if not due and not running and self._next is None:
            return [Shutdown()]
        self.most_at_once = max(self.most_at_once, len(running))
        return due

    def send(self, message: Up) -> None:
        self.controller.receive(message)
        assert self.controller.failed is None, message

    def wait(self, timeout_s: float) -> bool:
        return True
