"""Heartbeats of one worker: the time of its last message, and of its last progress."""

from dataclasses import dataclass

from mlx_dp.proto.messages.events import Heartbeat


@dataclass(slots=True)
class Heartbeats:
    """The time of a worker's last message, and of its last progress.

    ``idle_before_step_s``: how long the worker was idle before the step that it may be in now. It
    is 0 once that step is over: its tokens have arrived, or the next step was launched too.
    """

    heard_at: float
    progressed_at: float
    num_received: int = 0
    last: Heartbeat | None = None
    idle_before_step_s: float = 0.0
    _idle_since: float | None = None
    _first_step: int = 0

    @property
    def step_tokens(self) -> int:
        """Prompt tokens of the steps that the worker may be in."""
        return 0 if self.last is None else self.last.step_tokens

    @property
    def prefill_token_s(self) -> float | None:
        """The prefill pace that the worker has measured, in seconds per prompt token."""
        return None if self.last is None else self.last.prefill_token_s

    def note_message(self, now: float) -> None:
        """Note a message of any kind: the worker is alive."""
        self.heard_at = now

    def note_tokens(self, now: float) -> None:
        """Note tokens. They are progress, and come before the heartbeat that reports their step."""
        self.heard_at = now
        self.progressed_at = now
        self.idle_before_step_s = 0.0

    def note_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a heartbeat. A new step counts as progress; so does being idle, now or before."""
        last = self.last
        idle = heartbeat.running == 0 or last is None or last.running == 0
        if idle or last is None or heartbeat.step != last.step:
            self.progressed_at = now
        self._track_idle_time(heartbeat, now)
        self.heard_at = now
        self.num_received += 1
        self.last = heartbeat

    def _track_idle_time(self, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.running == 0:
            self._idle_since = now if self._idle_since is None else self._idle_since
            self.idle_before_step_s = 0.0
        elif self._idle_since is not None:
            self.idle_before_step_s = now - self._idle_since
            self._idle_since, self._first_step = None, heartbeat.step
        elif heartbeat.step > self._first_step + 1:
            self.idle_before_step_s = 0.0

    def restart_clocks(self, now: float) -> None:
        """Restart both clocks, since the controller itself did not run for a while."""
        self.heard_at = now
        self.progressed_at = now
