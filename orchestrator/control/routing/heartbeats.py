"""The heartbeats of one worker: when it was last heard, and when it last made progress."""

from dataclasses import dataclass

from mlx_dp.proto.messages.protocol import Heartbeat


@dataclass(slots=True)
class Heartbeats:
    """When a worker was last heard, and when it last made progress.

    ``rested_s``: how long the worker was idle before its first step, which it may still be in. It
    is 0 once that step is over: with its tokens, or when the step after it has been launched too.
    """

    heard_at: float
    progressed_at: float
    beats: int = 0
    last: Heartbeat | None = None
    rested_s: float = 0.0
    _idle_since: float | None = None
    _woken_at_step: int = 0

    @property
    def step_tokens(self) -> int:
        """Prompt tokens of the steps that the worker may be in."""
        return 0 if self.last is None else self.last.step_tokens

    @property
    def prefill_token_s(self) -> float | None:
        """The prefill pace that the worker has measured, in seconds per prompt token."""
        return None if self.last is None else self.last.prefill_token_s

    def heard(self, now: float) -> None:
        """A message of any kind has come: the worker lives."""
        self.heard_at = now

    def progressed(self, now: float) -> None:
        """Tokens have come: progress, before the next heartbeat reports the step that made them."""
        self.heard_at = now
        self.progressed_at = now
        self.rested_s = 0.0

    def add(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat has come. A new step is progress; so is having, or having had, no request."""
        last = self.last
        idle = heartbeat.running == 0 or last is None or last.running == 0
        if idle or last is None or heartbeat.step != last.step:
            self.progressed_at = now
        self._track_idle_time(heartbeat, now)
        self.heard_at = now
        self.beats += 1
        self.last = heartbeat

    def _track_idle_time(self, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.running == 0:
            self._idle_since = now if self._idle_since is None else self._idle_since
            self.rested_s = 0.0
        elif self._idle_since is not None:
            self.rested_s = now - self._idle_since
            self._idle_since, self._woken_at_step = None, heartbeat.step
        elif heartbeat.step > self._woken_at_step + 1:
            self.rested_s = 0.0

    def forgive(self, now: float) -> None:
        """Start over, since the controller itself missed some time."""
        self.heard_at = now
        self.progressed_at = now
