"""Tells the controller how a worker's start fares, and listens while that waits for peers."""

from collections.abc import Callable
from typing import Final

from mlx_dp.proto.messages import WorkerPhase
from mlx_dp.worker import pulse
from mlx_dp.worker.held_verbs import HeldVerbs


class StartBeats:
    """One heartbeat as each phase is entered, and more while a peer is late in it."""

    def __init__(self, channel: HeldVerbs, interval_s: float, clock: Callable[[], float]) -> None:
        self._channel: Final = channel
        self._interval_s: Final = interval_s
        self._clock: Final = clock
        self._phase: WorkerPhase | None = None
        self._beat_at = clock()

    def enter(self, phase: WorkerPhase) -> None:
        self._phase = phase
        self._beat(None)

    def awaiting(self, rank: int) -> None:
        """A pass waits for this rank. Raises ShutdownAskedError."""
        if self._clock() - self._beat_at >= self._interval_s:
            self._beat(rank)
        self._channel.listen()

    def agreed(self, peer_tokens: int) -> None:
        """How long a start may take does not depend on tokens."""

    def _beat(self, awaits_rank: int | None) -> None:
        assert self._phase is not None, "enter() comes first"
        self._beat_at = self._clock()
        self._channel.send(pulse.starting(self._phase, awaits_rank))
