"""The heartbeats of a worker, from start-up and the loop. Only the main thread sends them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil

from mlx_dp.proto.messages.events import Heartbeat, WorkerPhase
from mlx_dp.worker.channel import BufferedChannel
from mlx_dp.worker.contract.engine import Engine
from mlx_dp.worker.scheduling.prefill_pace import PrefillPace
from mlx_dp.worker.scheduling.scheduler import Scheduler
from mlx_dp.worker.scheduling.step_timer import StepTime


def resident_nbytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def starting_heartbeat(phase: WorkerPhase, awaits_rank: int | None = None) -> Heartbeat:
    """Return the heartbeat of a worker that is not ready, as it enters a phase or waits in it."""
    return Heartbeat(
        phase=phase,
        step=0,
        running=0,
        prefilling=0,
        used_tokens=0,
        reserved_tokens=0,
        auxiliary_used=0,
        rss_nbytes=resident_nbytes(),
        device_nbytes=0,
        awaits_rank=awaits_rank,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The loop's part of a heartbeat. Fields are those of ``Heartbeat``."""

    step: int
    step_tokens: int
    malformed_frames: int
    awaits_rank: int | None = None
    prefill_token_s: float | None = None


_FEW_TOKENS: Final = 8
"""So few prompt tokens alone do not cause a heartbeat."""


class HeartbeatSchedule:
    """The time and content of the next heartbeat. The first is due at once."""

    def __init__(self, interval_s: float, resident: Callable[[], int] = resident_nbytes) -> None:
        self._interval_s = interval_s
        self._resident = resident
        self._due_at: float | None = None
        self._reported_tokens = 0

    def covers(self, step_tokens: int) -> bool:
        """Whether the last heartbeat reported about ``step_tokens`` prompt tokens: no fewer, and at
        most twice as many.

        The controller allows time for the reported tokens, so it must also hear when most of them
        are done.
        """
        return step_tokens <= self._reported_tokens <= max(2 * step_tokens, _FEW_TOKENS)

    def due_in(self, now: float) -> float:
        """Seconds to the next heartbeat; 0 when it is due."""
        return 0.0 if self._due_at is None else max(0.0, self._due_at - now)

    def make_due(self) -> None:
        """Make the next heartbeat due at once, since its content has changed."""
        self._due_at = None

    def make_heartbeat(
        self, now: float, state: LoopState, *, scheduler: Scheduler, engine: Engine
    ) -> Heartbeat:
        """Return the heartbeat to send now; set the time of the next."""
        self._due_at = now + self._interval_s
        self._reported_tokens = state.step_tokens
        memory = engine.memory()
        return Heartbeat(
            phase=WorkerPhase.DRAINING if scheduler.draining else WorkerPhase.SERVING,
            step=state.step,
            running=len(scheduler.requests),
            prefilling=scheduler.requests.prefilling,
            used_tokens=memory.used_tokens,
            reserved_tokens=scheduler.requests.reserved_tokens,
            auxiliary_used=scheduler.auxiliary_used,
            rss_nbytes=self._resident(),
            device_nbytes=memory.device_nbytes,
            cached_tokens=scheduler.cached_tokens,
            cached_nbytes=scheduler.cached_nbytes,
            held_nbytes=engine.held_nbytes,
            held_buffers=engine.held_buffers,
            step_tokens=state.step_tokens,
            prefill_token_s=state.prefill_token_s,
            malformed_frames=state.malformed_frames,
            awaits_rank=state.awaits_rank,
            passes=None if engine.peers is None else engine.peers.totals,
        )


class LoopHeartbeats:
    """Sends the loop's heartbeats, also in the middle of a step. It is the ``PassWatch`` of a
    group.

    ``step`` counts the loop's steps. A step lasts as long as its passes, so the peers' tokens in
    these passes count like own tokens.
    """

    def __init__(
        self,
        channel: BufferedChannel,
        engine: Engine,
        scheduler: Scheduler,
        schedule: HeartbeatSchedule,
        clock: Callable[[], float],
    ) -> None:
        self._channel: Final = channel
        self._engine: Final = engine
        self._scheduler: Final = scheduler
        self._schedule: Final = schedule
        self._clock: Final = clock
        self._pace: Final = PrefillPace()
        self._own_tokens = 0
        self._peer_tokens = 0
        self._peer_tokens_before = 0
        self.step = 0

    @property
    def due_in(self) -> float:
        """Seconds to the next heartbeat; 0 when it is due."""
        return self._schedule.due_in(self._clock())

    def begin_step(self, own_tokens: int) -> None:
        """Record that a step begins. ``own_tokens``: prompt tokens under way, including those of
        the step before.
        """
        self._own_tokens = own_tokens
        self._peer_tokens_before, self._peer_tokens = self._peer_tokens, 0
        self._report_tokens()

    def launched(self, own_tokens: int) -> None:
        """Record that the step is launched; ``own_tokens`` prompt tokens may still be under way.

        The step before is done: the controller must not allow time for its tokens any more.
        """
        self._own_tokens = own_tokens
        self.step += 1
        self._report_tokens()

    def measured(self, step: StepTime) -> None:
        """Update the pace with a measured step."""
        # A blocking step is measured at its own call, any other at the next one's.
        blocks = self._engine.launch_blocks
        peer_tokens = self._peer_tokens if blocks else self._peer_tokens_before
        self._pace.observe(step.duration_s, step.prefilled + peer_tokens)

    def idle(self) -> None:
        """Record that no step of this worker is under way."""
        self._own_tokens = 0
        self._peer_tokens_before, self._peer_tokens = self._peer_tokens, 0

    def send_if_due(self) -> bool:
        """Send a heartbeat if one is due; return whether it was."""
        if self.due_in > 0.0:
            return False
        self._send()
        return True

    def awaiting(self, rank: int) -> None:
        """Report that a pass waits for ``rank``, and read commands."""
        if self.due_in <= 0.0:
            self._send(awaits_rank=rank)
        self._channel.listen()

    def agreed(self, peer_tokens: int) -> None:
        """Add the tokens that peers run in a pass that begins."""
        self._peer_tokens += peer_tokens
        self._report_tokens()

    @property
    def _step_tokens(self) -> int:
        return self._own_tokens + self._peer_tokens + self._peer_tokens_before

    def _report_tokens(self) -> None:
        # Report a step before it runs: no heartbeat leaves while the device computes.
        if not self._schedule.covers(self._step_tokens):
            self._send()

    def _send(self, awaits_rank: int | None = None) -> None:
        state = LoopState(
            step=self.step,
            step_tokens=self._step_tokens,
            malformed_frames=self._channel.malformed_frames,
            awaits_rank=awaits_rank,
            prefill_token_s=self._pace.token_s,
        )
        self._channel.send(
            self._schedule.make_heartbeat(
                self._clock(), state, scheduler=self._scheduler, engine=self._engine
            )
        )


class StartHeartbeats:
    """Sends a heartbeat when each phase begins, and more while a peer is late."""

    def __init__(
        self, channel: BufferedChannel, interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._channel: Final = channel
        self._interval_s: Final = interval_s
        self._clock: Final = clock
        self._phase: WorkerPhase | None = None
        self._sent_at = clock()

    def enter(self, phase: WorkerPhase) -> None:
        self._phase = phase
        self._send(None)

    def awaiting(self, rank: int) -> None:
        """Report that a pass waits for ``rank``; read commands. Raises ShutdownRequestedError."""
        if self._clock() - self._sent_at >= self._interval_s:
            self._send(rank)
        self._channel.listen()

    def agreed(self, peer_tokens: int) -> None:
        """Do nothing: time limits of a start do not depend on tokens."""

    def _send(self, awaits_rank: int | None) -> None:
        assert self._phase is not None, "enter() comes first"
        self._sent_at = self._clock()
        self._channel.send(starting_heartbeat(self._phase, awaits_rank))
