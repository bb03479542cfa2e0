"""Whether a worker lives, by what its decode loop says, and never while we slept ourselves."""

from dataclasses import dataclass
from enum import StrEnum

from mlx_dp.proto.messages import Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """How long a worker may be silent, or busy without a step.

    A step that prefills a chunk may rightly take long, and no beat leaves during a step.
    """

    heartbeat_interval_s: float = 0.5
    suspicious_beats: int = 4
    hang_timeout_s: float = 10.0
    prefill_hang_timeout_s: float = 120.0
    accept_timeout_s: float = 10.0
    release_timeout_s: float = 30.0


class Verdict(StrEnum):
    """SUSPICIOUS gets no new requests; HUNG and SILENT are lost."""

    ALIVE = "alive"
    SUSPICIOUS = "suspicious"
    HUNG = "hung"
    SILENT = "silent"


@dataclass(slots=True)
class Pulse:
    """When a worker was last heard, and when it last made progress."""

    heard_at: float
    moved_at: float
    beats: int = 0
    last: Heartbeat | None = None

    def heard(self, now: float) -> None:
        """Any message is life."""
        self.heard_at = now

    def moved(self, now: float) -> None:
        """Tokens are progress, before the next beat tells of the step that made them."""
        self.heard_at = now
        self.moved_at = now

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Progress is a step, having nothing to do, or having just got something."""
        last = self.last
        idle = heartbeat.running == 0 or last is None or last.running == 0
        if idle or last is None or heartbeat.step != last.step:
            self.moved_at = now
        self.heard_at = now
        self.beats += 1
        self.last = heartbeat

    def forgive(self, now: float) -> None:
        """Start over: whatever was missed was missed by us."""
        self.heard_at = now
        self.moved_at = now


def judge(pulse: Pulse, limits: LivenessLimits, *, prefilling: bool, now: float) -> Verdict:
    """Judge one ready worker. ``prefilling``: some request of it has no token yet."""
    silent_s = now - pulse.heard_at
    allowed_s = limits.prefill_hang_timeout_s if prefilling else limits.hang_timeout_s
    if silent_s > allowed_s:
        return Verdict.SILENT
    busy = pulse.last is not None and pulse.last.running > 0
    if busy and now - pulse.moved_at > allowed_s:
        return Verdict.HUNG
    if silent_s > limits.suspicious_beats * limits.heartbeat_interval_s:
        return Verdict.SUSPICIOUS
    return Verdict.ALIVE


def overdue(pulse: Pulse, *, since: float, beats: int, timeout_s: float, now: float) -> bool:
    """Whether a worker has ignored a message that was sent at ``since``, at its beat ``beats``.

    Two beats since then mean that its loop has turned in between and has read what was there; a
    worker in a long step has not, and is judged by its silence alone.
    """
    return now - since > timeout_s and pulse.beats >= beats + 2


@dataclass(slots=True)
class OwnLag:
    """Notices that the controller itself did not run: a closed lid, a debugger, SIGSTOP."""

    tolerance_s: float
    _expected: float | None = None

    def slept(self, now: float, interval_s: float) -> float:
        """Seconds missed since the last call, or 0. ``interval_s``: until the next call."""
        missed = 0.0 if self._expected is None else now - self._expected
        self._expected = now + interval_s
        return missed if missed > self.tolerance_s else 0.0
