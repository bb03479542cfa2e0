"""Whether a worker lives, by what its decode loop says, and never while we slept ourselves."""

from dataclasses import dataclass
from enum import StrEnum

from mlx_dp.proto.messages import Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """How long a worker may be silent, or busy without a step.

    No beat leaves during a step, and one that prefills may rightly take long: so much longer as
    its prompt tokens take at ``slowest_prefill_tokens_per_s``.
    """

    heartbeat_interval_s: float = 0.5
    suspicious_beats: int = 4
    hang_timeout_s: float = 10.0
    slowest_prefill_tokens_per_s: float = 10.0
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

    @property
    def step_tokens(self) -> int:
        """Prompt tokens of the steps that it may be in."""
        return 0 if self.last is None else self.last.step_tokens

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


def judge(pulse: Pulse, limits: LivenessLimits, *, step_tokens: int, now: float) -> Verdict:
    """Judge one ready worker. ``step_tokens``: prompt tokens of the steps that it may be in."""
    silent_s = now - pulse.heard_at
    allowed_s = limits.hang_timeout_s + step_tokens / limits.slowest_prefill_tokens_per_s
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

    A turn of its loop sends two beats at most, so that three mean that it has read since then what
    was there; a worker in a long step has not, and is judged by its silence alone.
    """
    return now - since > timeout_s and pulse.beats >= beats + 3


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
