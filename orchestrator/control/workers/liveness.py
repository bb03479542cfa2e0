"""Liveness: judges a worker by the heartbeats of its decode loop, and the controller's own lag."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mlx_dp.orchestrator.control.state.heartbeats import Heartbeats

MISSING_HEARTBEATS: Final = 4
"""A worker gets no new request once so many heartbeats are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """How long a worker may be silent, or busy without a step.

    A worker sends no heartbeat during a step, and a step with prompt tokens can take long. Its
    allowance is ``prefill_margin`` times what its prompt tokens take at the pace that the worker
    has measured, at most ``longest_step_s``. Before a pace is measured, it is what they take at
    ``slowest_prefill_tokens_per_s``, at most ``longest_first_step_s``.

    After ``idle_s`` without work, the first step gets the allowance of an unmeasured pace, plus
    ``first_step_s``: the system may have compressed or dropped the pages of the weights.
    """

    heartbeat_interval_s: float = 0.5
    missing_heartbeats: int = MISSING_HEARTBEATS
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
        return self.missing_heartbeats * self.heartbeat_interval_s


class LivenessVerdict(StrEnum):
    """SUSPICIOUS: gets no new requests, since it may be in a long step. HUNG, SILENT: is lost.

    OVERDUE: is suspicious for longer than its step may take.
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
    idle_before_step_s: float = 0.0,
) -> float:
    """Return the seconds that steps with ``step_tokens`` may take on top of the time-outs."""
    guessed_s = step_tokens / limits.slowest_prefill_tokens_per_s
    if idle_before_step_s >= limits.idle_s:
        guessed_s += limits.first_step_s
    guessed_s = min(guessed_s, limits.longest_first_step_s)
    if prefill_token_s is None:
        return guessed_s
    paced_s = min(limits.prefill_margin * step_tokens * prefill_token_s, limits.longest_step_s)
    return max(paced_s, guessed_s) if idle_before_step_s >= limits.idle_s else paced_s


def judge(
    heartbeats: Heartbeats, limits: LivenessLimits, *, step_s: float, now: float
) -> LivenessVerdict:
    """Judge one ready worker. ``step_s``: the time allowed for the steps that it may be in."""
    silent_s = now - heartbeats.heard_at
    if silent_s > limits.hang_timeout_s + step_s:
        return LivenessVerdict.SILENT
    busy = heartbeats.last is not None and heartbeats.last.running > 0
    stuck_s = now - heartbeats.progressed_at if busy else 0.0
    if stuck_s > limits.hang_timeout_s + step_s:
        return LivenessVerdict.HUNG
    if max(silent_s, stuck_s) > limits.suspicious_s + step_s:
        return LivenessVerdict.OVERDUE
    return LivenessVerdict.SUSPICIOUS if silent_s > limits.suspicious_s else LivenessVerdict.ALIVE


def ignores_message(
    heartbeats: Heartbeats, *, since: float, heartbeats_before: int, timeout_s: float, now: float
) -> bool:
    """Whether a worker ignores a message that was sent after ``heartbeats_before`` heartbeats.

    One pass of its loop sends at most two heartbeats, so after three more it has read its messages.
    During a long step a worker reads none and sends no heartbeat: only its silence counts then.
    """
    return now - since > timeout_s and heartbeats.num_received >= heartbeats_before + 3


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
