"""Stalled rank: finds the rank that blocks the others of a lockstep group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlx_dp.orchestrator.control.state.heartbeats import Heartbeats
from mlx_dp.orchestrator.control.workers.liveness import LivenessLimits


@dataclass(frozen=True, slots=True)
class Stall:
    """The rank that does not join a pass, and how that is known."""

    index: int
    detail: str


def stalled_rank(
    ranks: Mapping[int, Heartbeats],
    limits: LivenessLimits,
    halted: Callable[[int], bool],
    *,
    now: float,
) -> Stall | None:
    """Return the one rank that the others wait for, or None unless exactly one is known.

    A rank that waits for an announcement reports the rank that it waits for. A rank inside a
    collective can report nothing, nor can the one that it waits for; so ``halted`` asks the system
    which process was stopped.
    """
    reported = {index: _awaits(heartbeats, limits, now) for index, heartbeats in ranks.items()}
    waits = {index: rank for index, rank in reported.items() if rank is not None}
    awaited = {end for index in waits if (end := chain_end(waits, index)) is not None}
    stopped = {index for index in {*ranks, *awaited} if halted(index)}
    if len(stopped) == 1:
        return Stall(stopped.pop(), "it was stopped by a signal, and its group waits for it")
    if len(awaited) != 1:
        return None
    (index,) = awaited
    waiting = min(each for each in waits if chain_end(waits, each) == index)
    return Stall(index, f"worker {waiting} waits for it")


def _awaits(heartbeats: Heartbeats, limits: LivenessLimits, now: float) -> int | None:
    """The rank that this one waits for, by a report that is recent enough."""
    if heartbeats.last is None or now - heartbeats.heard_at > limits.suspicious_s:
        return None
    return heartbeats.last.awaits_rank


def chain_end(waits: Mapping[int, int], index: int) -> int | None:
    """Return the rank at the end of a chain of waiting ranks; None for a cycle."""
    for _ in waits:
        index = waits[index]
        if index not in waits:
            return index
    return None
