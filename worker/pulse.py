"""The heartbeat of a worker, which comes from its decode loop and from nowhere else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil

from mlx_dp.proto.messages import Heartbeat, WorkerPhase
from mlx_dp.worker.engine import Engine
from mlx_dp.worker.scheduler import Scheduler


def resident_nbytes() -> int:
    """Memory of this process as the system counts it."""
    return int(psutil.Process().memory_info().rss)


def starting(phase: WorkerPhase, awaits_rank: int | None = None) -> Heartbeat:
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
class Moment:
    """What the loop itself knows of a moment, in the words of ``Heartbeat``."""

    step: int
    step_tokens: int
    malformed_frames: int
    awaits_rank: int | None = None
    prefill_token_s: float | None = None


_FEW_TOKENS: Final = 8
"""Prompt tokens so few that no heartbeat is sent only because they are computed."""


class Pulse:
    """Says when the next heartbeat is due, and what it says. The first is due at once."""

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
        self, now: float, moment: Moment, *, scheduler: Scheduler, engine: Engine
    ) -> Heartbeat:
        """Return the heartbeat of this moment, and set the time of the next."""
        self._due_at = now + self._interval_s
        self._told_tokens = moment.step_tokens
        memory = engine.memory()
        return Heartbeat(
            phase=WorkerPhase.DRAINING if scheduler.draining else WorkerPhase.SERVING,
            step=moment.step,
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
            step_tokens=moment.step_tokens,
            prefill_token_s=moment.prefill_token_s,
            malformed_frames=moment.malformed_frames,
            awaits_rank=moment.awaits_rank,
            passes=None if engine.peers is None else engine.peers.totals,
        )
