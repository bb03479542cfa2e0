"""Which rank of a group keeps the others, when some of them look stuck."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlx_dp.orchestrator.control.heartbeats import Heartbeats
from mlx_dp.orchestrator.control.liveness import LivenessLimits


@dataclass(frozen=True, slots=True)
class Stall:
    """The rank that does not come to a pass, and how that is known."""

    index: int
    detail: str


def stalled_rank(
    ranks: Mapping[int, Heartbeats],
    limits: LivenessLimits,
    halted: Callable[[int], bool],
    *,
    now: float,
) -> Stall | None:
    """Name the one rank that the others wait for, or None where it is not known to be one alone.

    A rank that waits for an announcement says so; one in a collective can say nothing, just like
    the one that it waits for, so that the system is asked which process was ``halted``.
    """
    told = {index: _awaits(heartbeats, limits, now) for index, heartbeats in ranks.items()}
    waits = {index: rank for index, rank in told.items() if rank is not None}
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
    """For whom a rank waits, as far as what it said still holds."""
    if heartbeats.last is None or now - heartbeats.heard_at > limits.suspicious_s:
        return None
    return heartbeats.last.awaits_rank


def chain_end(waits: Mapping[int, int], index: int) -> int | None:
    """Return the rank that a chain of waiting ranks leads to; None when it leads back to itself."""
    for _ in waits:
        index = waits[index]
        if index not in waits:
            return index
    return None
