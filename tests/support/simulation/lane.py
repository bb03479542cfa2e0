"""One direction of a connection: frames in flight, in order except for faults."""

import random
from collections import deque
from collections.abc import Callable

from tests.support.simulation.agenda import Agenda
from tests.support.simulation.armed import Armed
from tests.support.simulation.schedule import FaultKind

TAMPERING = (FaultKind.DROP, FaultKind.REPEAT, FaultKind.LATE, FaultKind.GARBLE)


class Lane:
    """Frames arrive after some latency, in the order in which they were sent, except for faults."""

    def __init__(
        self,
        agenda: Agenda,
        rng: random.Random,
        latency_s: float,
        armed: Armed,
        arrive: Callable[[bytes], None],
    ) -> None:
        self._agenda = agenda
        self._rng = rng
        self._latency_s = latency_s
        self._armed = armed
        self._arrive = arrive
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._held: list[bytes] = []
        self._last_at = 0.0
        self.closed = False
        self.holds = False
        """Frames stay with their sender."""
        self.extra_s = 0.0
        self.late = 0
        """Frames that will arrive out of order."""

    def __len__(self) -> int:
        return len(self._under_way) + len(self._held)

    def put(self, tag: str, frame: bytes) -> None:
        """Send a frame, unless a fault changes its way."""
        for fault in self._armed.due(tag, *TAMPERING):
            match fault.kind:
                case FaultKind.DROP:
                    return
                case FaultKind.LATE:
                    self._come_late(frame, fault.for_s)
                    return
                case FaultKind.REPEAT:
                    self._come_late(frame, fault.for_s)
                case _:
                    frame = frame[: len(frame) // 2]
        if self.holds:
            self._held.append(frame)
        else:
            self._send(frame)

    def _come_late(self, frame: bytes, delay_s: float) -> None:
        def come() -> None:
            self.late -= 1
            self._arrived(frame)

        self.late += 1
        self._agenda.after(delay_s, come)

    def _send(self, frame: bytes) -> None:
        now = self._agenda.now
        latency_s = self._latency_s * self._rng.choice((0.0, 0.0, 0.5, 1.0)) + self.extra_s
        at = max(now + latency_s, self._last_at)
        if not self._under_way or at > self._last_at:
            self._agenda.at(at, self._due)
        self._last_at = at
        self._under_way.append((at, frame))

    def _due(self) -> None:
        now = self._agenda.now
        while self._under_way and self._under_way[0][0] <= now:
            self._arrived(self._under_way.popleft()[1])

    def _arrived(self, frame: bytes) -> None:
        if not self.closed:
            self._arrive(frame)

    def release(self) -> None:
        """Send the held frames."""
        self.holds = False
        for frame in self._held:
            self._send(frame)
        self._held.clear()

    def lose(self, *, most: int | None = None) -> None:
        """Lose all frames in flight, or up to this number of the last ones."""
        if most is None:
            self._under_way.clear()
            return
        self._held.clear()
        for _ in range(min(most, len(self._under_way))):
            self._under_way.pop()
