"""The heartbeats of one worker: when it was last heard, and when it last made progress."""

from dataclasses import dataclass

from mlx_dp.proto.messages import Heartbeat


@dataclass(slots=True)
class Heartbeats:
    """When a worker was last heard, and when it last made progress."""

    heard_at: float
    progressed_at: float
    beats: int = 0
    last: Heartbeat | None = None

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

    def add(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat has come. A new step is progress; so is having, or having had, no request."""
        last = self.last
        idle = heartbeat.running == 0 or last is None or last.running == 0
        if idle or last is None or heartbeat.step != last.step:
            self.progressed_at = now
        self.heard_at = now
        self.beats += 1
        self.last = heartbeat

    def forgive(self, now: float) -> None:
        """Start over, since the controller itself missed some time."""
        self.heard_at = now
        self.progressed_at = now
