"""Faults that wait for a certain message, and count down to it."""

from dataclasses import dataclass

from tests.support.simulation.schedule import Fault, FaultKind


@dataclass(slots=True)
class _Waiting:
    fault: Fault
    left: int


class Armed:
    """Faults of one worker, across its incarnations. Each is injected once."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def arm(self, fault: Fault) -> None:
        self._waiting.append(_Waiting(fault, fault.nth))

    def due(self, tag: str, *kinds: FaultKind) -> list[Fault]:
        """Count one message, and remove the faults of these kinds that it triggers."""
        if not self._waiting:
            return []
        for each in self._waiting:
            each.left -= each.fault.kind in kinds and each.fault.tag in ("", tag)
        found = [each.fault for each in self._waiting if not each.left]
        self._waiting = [each for each in self._waiting if each.left]
        return found

    def disarm(self) -> None:
        self._waiting.clear()
