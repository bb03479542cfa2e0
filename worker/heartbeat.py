"""The heartbeats of a worker: from its start and its decode loop, and from no other thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil

from mlx_dp.proto.messages.protocol import Heartbeat, WorkerPhase
from mlx_dp.worker.buffered_channel import BufferedChannel
from mlx_dp.worker.contract.engine import Engine
from mlx_dp.worker.scheduling.prefill_pace import PrefillPace
from mlx_dp.worker.scheduling.scheduler import Scheduler
from mlx_dp.worker.scheduling.step_timer import StepTime


def resident_nbytes() -> int:
    """Memory of this process as the system counts it."""
    return int(psutil.Process().memory_info().rss)


def starting_heartbeat(phase: WorkerPhase, awaits_rank: int | None = None) -> Heartbeat:
    """The heartbeat of a worker that cannot serve yet, as it enters a phase or waits in it."""
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
    """The loop's own part of a heartbeat, in the words of ``Heartbeat``."""

    step: int
    step_tokens: int
    malformed_frames: int
    awaits_rank: int | None = None
    prefill_token_s: float | None = None


_FEW_TOKENS: Final = 8
"""Prompt tokens so few that no heartbeat is sent only because they are computed."""


class HeartbeatSchedule:
    """When the next heartbeat is due, and its content. The first is due at once."""

    def __init__(self, interval_s: float, resident: Callable[[], int] = resident_nbytes) -> None:
        self._interval_s = interval_s
        self._resident = resident
        self._due_at: float | None = None
        self._told_tokens = 0

    def tells(self, step_tokens: int) -> bool:
        """Whether the last heartbeat told of about so many prompt tokens: no fewer, and no more
        than twice as many.

        The controller allows time for what it was told of, so that it has to hear as well when
        most of that is done.
        """
        return step_tokens <= self._told_tokens <= max(2 * step_tokens, _FEW_TOKENS)

    def due_in(self, now: float) -> float:
        """Seconds to the next heartbeat; 0 when it is due."""
        return 0.0 if self._due_at is None else max(0.0, self._due_at - now)

    def hasten(self) -> None:
        """Make the next heartbeat due at once, since there is news to tell."""
        self._due_at = None

    def beat(
        self, now: float, state: LoopState, *, scheduler: Scheduler, engine: Engine
    ) -> Heartbeat:
        """Return the heartbeat to send now, and set the time of the next."""
        self._due_at = now + self._interval_s
        self._told_tokens = state.step_tokens
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
    """Sends the loop's heartbeats, in the middle of a step as well. Passes of a group report here.

    ``step`` counts the loop's steps. A step lasts as long as the passes that it is part of, so
    the tokens of the peers in them count like one's own.
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
        """A step begins with so many prompt tokens under way, those of the step before included."""
        self._own_tokens = own_tokens
        self._peer_tokens_before, self._peer_tokens = self._peer_tokens, 0
        self._tell()

    def launched(self, own_tokens: int) -> None:
        """The step is launched, and so many prompt tokens may still be under way.

        The step before it is done, whose tokens the controller must not allow time for any more.
        """
        self._own_tokens = own_tokens
        self.step += 1
        self._tell()

    def took(self, step: StepTime) -> None:
        """A step was measured: its prompt tokens tell how long the next ones may take."""
        # A step that blocks is measured itself, any other while the next one is under way.
        blocks = self._engine.launch_blocks
        peer_tokens = self._peer_tokens if blocks else self._peer_tokens_before
        self._pace.observe(step.duration_s, step.prefilled + peer_tokens)

    def idle(self) -> None:
        """No step of this worker's own is under way."""
        self._own_tokens = 0
        self._peer_tokens_before, self._peer_tokens = self._peer_tokens, 0

    def if_due(self) -> bool:
        """Send a heartbeat if it is time."""
        if self.due_in > 0.0:
            return False
        self._beat()
        return True

    def awaiting(self, rank: int) -> None:
        """A pass waits for this rank. The controller may know why."""
        if self.due_in <= 0.0:
            self._beat(awaits_rank=rank)
        self._channel.listen()

    def agreed(self, peer_tokens: int) -> None:
        """A pass begins, in which the peers run so many tokens."""
        self._peer_tokens += peer_tokens
        self._tell()

    @property
    def _step_tokens(self) -> int:
        return self._own_tokens + self._peer_tokens + self._peer_tokens_before

    def _tell(self) -> None:
        # The controller hears of a step before it: no heartbeat leaves while the device computes.
        if not self._schedule.tells(self._step_tokens):
            self._beat()

    def _beat(self, awaits_rank: int | None = None) -> None:
        state = LoopState(
            step=self.step,
            step_tokens=self._step_tokens,
            malformed_frames=self._channel.malformed_frames,
            awaits_rank=awaits_rank,
            prefill_token_s=self._pace.token_s,
        )
        self._channel.send(
            self._schedule.beat(
                self._clock(), state, scheduler=self._scheduler, engine=self._engine
            )
        )


class StartHeartbeats:
    """One heartbeat as each phase is entered, and more while a peer is late in it."""

    def __init__(
        self, channel: BufferedChannel, interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._channel: Final = channel
        self._interval_s: Final = interval_s
        self._clock: Final = clock
        self._phase: WorkerPhase | None = None
        self._beat_at = clock()

    def enter(self, phase: WorkerPhase) -> None:
        self._phase = phase
        self._beat(None)

    def awaiting(self, rank: int) -> None:
        """A pass waits for this rank. Raises ShutdownRequestedError."""
        if self._clock() - self._beat_at >= self._interval_s:
            self._beat(rank)
        self._channel.listen()

    def agreed(self, peer_tokens: int) -> None:
        """A start has no allowance that depends on tokens."""

    def _beat(self, awaits_rank: int | None) -> None:
        assert self._phase is not None, "enter() comes first"
        self._beat_at = self._clock()
        self._channel.send(starting_heartbeat(self._phase, awaits_rank))
