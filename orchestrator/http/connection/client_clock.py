"""Deadlines of one connection: how long its client may take to send or to read. Pure."""

from dataclasses import dataclass
from enum import Enum
from typing import Final, assert_never

LEAST_TAKEN_NBYTES: Final = 32 * 2**10
"""A client that reads this much of its response within ``send_s`` is not idle: about 1 KiB/s."""


class ClientPhase(Enum):
    """IDLE: between requests. HEAD, BODY: it sends one. ANSWER: it waits for the response."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"


class Overdue(Enum):
    """The deadline that passed. SENT: the client reads next to nothing of its response."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    SENT = "sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeouts:
    """Seconds that a client has for each phase."""

    idle_s: float
    head_s: float
    body_s: float
    send_s: float


class ClientClock:
    """The clock of one connection. A new client must send its first request at once."""

    def __init__(self, now: float) -> None:
        self.phase = ClientPhase.HEAD
        self._since = now
        self._unsent_nbytes = 0
        self._taken_nbytes = 0
        self._taken_since = now

    def enter(self, phase: ClientPhase, now: float) -> None:
        """Note the phase. A phase that lasts keeps its start: slow bytes gain no time."""
        if phase is not self.phase:
            self.phase = phase
            self._since = now

    def unsent(self, nbytes: int, *, written_nbytes: int, now: float) -> None:
        """Note how many of the bytes written so far the client has yet to read."""
        self._unsent_nbytes = nbytes
        taken_nbytes = written_nbytes - nbytes
        # Not by how much is left, which also changes with each write.
        if not nbytes or taken_nbytes - self._taken_nbytes >= LEAST_TAKEN_NBYTES:
            self._taken_nbytes = taken_nbytes
            self._taken_since = now

    def overdue(self, timeouts: ClientTimeouts, now: float) -> Overdue | None:
        if self._unsent_nbytes and now - self._taken_since >= timeouts.send_s:
            return Overdue.SENT
        match self.phase:
            case ClientPhase.IDLE:
                limit_s, overdue = timeouts.idle_s, Overdue.IDLE
            case ClientPhase.HEAD:
                limit_s, overdue = timeouts.head_s, Overdue.HEAD
            case ClientPhase.BODY:
                limit_s, overdue = timeouts.body_s, Overdue.BODY
            case ClientPhase.ANSWER:
                return None
            case unknown:
                assert_never(unknown)
        return overdue if now - self._since >= limit_s else None
