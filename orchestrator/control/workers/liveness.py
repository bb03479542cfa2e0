"""Liveness: judges a worker by the heartbeats of its decode loop, and the controller's own lag."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mlx_dp.orchestrator.control.routing.heartbeats import Heartbeats

SUSPICIOUS_BEATS: Final = 4
"""A worker gets no new request once so many heartbeats are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """How long a worker may be silent, or busy without a step.

    No heartbeat leaves during a step, and a step that prefills may rightly take long. It is allowed
    ``prefill_margin`` times what its prompt tokens take at the pace that the worker has measured,
    at most ``longest_step_s``. Before a pace is measured it is allowed what they take at
    ``slowest_prefill_tokens_per_s``, at most ``longest_first_step_s``.

    After ``idle_s`` without work, the first step is allowed as much as before a pace is measured,
    and ``first_step_s`` more: the system may have compressed or dropped the pages of the weights.
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


def step_allowance_s(
    limits: LivenessLimits,
    *,
    step_tokens: int,
    prefill_token_s: float | None,
    rested_s: float = 0.0,
) -> float:
    """Return the seconds that steps with so many prompt tokens may take on top of the time-outs."""
    guessed_s = step_tokens / limits.slowest_prefill_tokens_per_s
    if rested_s >= limits.idle_s:
        guessed_s += limits.first_step_s
    guessed_s = min(guessed_s, limits.longest_first_step_s)
    if prefill_token_s is None:
        return guessed_s
    paced_s = min(limits.prefill_margin * step_tokens * prefill_token_s, limits.longest_step_s)
    return max(paced_s, guessed_s) if rested_s >= limits.idle_s else paced_s


def judge(heartbeats: Heartbeats, limits: LivenessLimits, *, step_s: float, now: float) -> Verdict:
    """Judge one ready worker. ``step_s``: the time allowed for the steps that it may be in."""
    silent_s = now - heartbeats.heard_at
    if silent_s > limits.hang_timeout_s + step_s:
        return Verdict.SILENT
    busy = heartbeats.last is not None and heartbeats.last.running > 0
    stuck_s = now - heartbeats.progressed_at if busy else 0.0
    if stuck_s > limits.hang_timeout_s + step_s:
        return Verdict.HUNG
    if max(silent_s, stuck_s) > limits.suspicious_s + step_s:
        return Verdict.OVERDUE
    return Verdict.SUSPICIOUS if silent_s > limits.suspicious_s else Verdict.ALIVE


def overdue(
    heartbeats: Heartbeats, *, since: float, beats: int, timeout_s: float, now: float
) -> bool:
    """Whether a worker has ignored a message sent at ``since``, after ``beats`` heartbeats.

    One pass of its loop sends at most two heartbeats, so after three it has read its messages since
    then. A worker in a long step has not, and is judged by its silence alone.
    """
    return now - since > timeout_s and heartbeats.beats >= beats + 3


@dataclass(slots=True)
class OwnLag:
    """Detects that the controller itself did not run: a closed lid, a debugger, SIGSTOP."""

    tolerance_s: float
    _expected: float | None = None

    def note_call(self, now: float, interval_s: float) -> float:
        """Return the seconds missed since the last call, or 0; the next is in ``interval_s``."""
        missed = 0.0 if self._expected is None else now - self._expected
        self._expected = now + interval_s
        return missed if missed > self.tolerance_s else 0.0
