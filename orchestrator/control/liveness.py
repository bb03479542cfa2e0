"""Whether a worker lives, by what its decode loop says, and never while we slept ourselves."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mlx_dp.proto.messages import Heartbeat

SUSPICIOUS_BEATS: Final = 4
"""A worker gets nothing new once so many heartbeats are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """How long a worker may be silent, or busy without a step.

    No heartbeat leaves during a step, and a step that prefills may rightly take long. The time
    allowed for it is ``prefill_margin`` times what its prompt tokens take at the pace that the
    worker has measured, at most ``longest_step_s``. Before any pace is measured it is what they
    take at ``slowest_prefill_tokens_per_s``, at most ``longest_first_step_s``.

    After ``idle_s`` without work the first step is allowed as much, and ``first_step_s`` beside it:
    the system may have compressed or dropped the pages of the weights, whatever the pace was.
    """

    heartbeat_interval_s: float = 0.5
    suspicious_beats: int = SUSPICIOUS_BEATS
    hang_timeout_s: float = 10.0
    slowest_prefill_tokens_per_s: float = 10.0
    prefill_margin: float = 8.0
    first_step_s: float = 30.0
    longest_first_step_s: float = 120.0
    longest_step_s: float = 300.0
    idle_s: float = 60.0
    accept_timeout_s: float = 10.0
    release_timeout_s: float = 30.0

    @property
    def suspicious_s(self) -> float:
        return self.suspicious_beats * self.heartbeat_interval_s


class Verdict(StrEnum):
    """SUSPICIOUS gets no new requests; HUNG and SILENT are lost.

    SUSPICIOUS may be in a long step; OVERDUE is suspicious beyond what its step may take.
    """

    ALIVE = "alive"
    SUSPICIOUS = "suspicious"
    OVERDUE = "overdue"
    HUNG = "hung"
    SILENT = "silent"


@dataclass(slots=True)
class Pulse:
    """When a worker was last heard, and when it last made progress.

    ``rested_s``: how long it had nothing to do before the first step, which it may still be in; 0
    once that is over: with its tokens, or when the step after it has been launched as well.
    """

    heard_at: float
    moved_at: float
    beats: int = 0
    last: Heartbeat | None = None
    rested_s: float = 0.0
    _idle_since: float | None = None
    _woken_at_step: int = 0

    @property
    def step_tokens(self) -> int:
        """Prompt tokens of the steps that it may be in."""
        return 0 if self.last is None else self.last.step_tokens

    @property
    def prefill_token_s(self) -> float | None:
        """The pace that it has measured: seconds of one prompt token."""
        return None if self.last is None else self.last.prefill_token_s

    def heard(self, now: float) -> None:
        """Any message is life."""
        self.heard_at = now

    def moved(self, now: float) -> None:
        """Tokens are progress, before the next beat tells of the step that made them."""
        self.heard_at = now
        self.moved_at = now
        self.rested_s = 0.0

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Progress is a step, having nothing to do, or having just got something."""
        last = self.last
        idle = heartbeat.running == 0 or last is None or last.running == 0
        if idle or last is None or heartbeat.step != last.step:
            self.moved_at = now
        self._rest(heartbeat, now)
        self.heard_at = now
        self.beats += 1
        self.last = heartbeat

    def _rest(self, heartbeat: Heartbeat, now: float) -> None:
        """Know whether it rests, or how long it did."""
        if heartbeat.running == 0:
            self._idle_since = now if self._idle_since is None else self._idle_since
            self.rested_s = 0.0
        elif self._idle_since is not None:
            self.rested_s = now - self._idle_since
            self._idle_since, self._woken_at_step = None, heartbeat.step
        elif heartbeat.step > self._woken_at_step + 1:
            self.rested_s = 0.0

    def forgive(self, now: float) -> None:
        """Start over: whatever was missed was missed by us."""
        self.heard_at = now
        self.moved_at = now


def step_allowance_s(
    limits: LivenessLimits,
    *,
    step_tokens: int,
    prefill_token_s: float | None,
    rested_s: float = 0.0,
) -> float:
    """Return the seconds that steps with so many prompt tokens may take, beside the time-outs."""
    guessed_s = step_tokens / limits.slowest_prefill_tokens_per_s
    if rested_s >= limits.idle_s:
        guessed_s += limits.first_step_s
    guessed_s = min(guessed_s, limits.longest_first_step_s)
    if prefill_token_s is None:
        return guessed_s
    paced_s = min(limits.prefill_margin * step_tokens * prefill_token_s, limits.longest_step_s)
    return max(paced_s, guessed_s) if rested_s >= limits.idle_s else paced_s


def judge(pulse: Pulse, limits: LivenessLimits, *, step_s: float, now: float) -> Verdict:
    """Judge one ready worker. ``step_s``: what the steps that it may be in are allowed."""
    silent_s = now - pulse.heard_at
    if silent_s > limits.hang_timeout_s + step_s:
        return Verdict.SILENT
    busy = pulse.last is not None and pulse.last.running > 0
    stuck_s = now - pulse.moved_at if busy else 0.0
    if stuck_s > limits.hang_timeout_s + step_s:
        return Verdict.HUNG
    if max(silent_s, stuck_s) > limits.suspicious_s + step_s:
        return Verdict.OVERDUE
    return Verdict.SUSPICIOUS if silent_s > limits.suspicious_s else Verdict.ALIVE


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
