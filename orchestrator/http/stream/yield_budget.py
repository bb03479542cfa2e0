"""The part of one turn of the event loop that may be spent on writing answers."""

import asyncio
from collections import deque
from typing import Final

TURN_UNITS: Final = 4096
"""A unit is a log-probability: about a microsecond to write, and as long to collect its garbage."""


class YieldBudget:
    """Spreads the work for all answers over turns of the event loop, first come, first served.

    A caller does the work that it spent units on before it awaits anything else. So one turn has
    work of at most twice ``TURN_UNITS``, or of one portion if that is larger. Invariant: while a
    caller waits, a call of ``_next_turn`` is scheduled.
    """

    def __init__(self) -> None:
        self._spent = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def spend(self, units: int) -> None:
        """Wait until this turn has room for so much work."""
        assert units > 0, units
        if not self._waiting and self._has_room(units):
            self._charge(units)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, place))
        await place

    def _has_room(self, units: int) -> bool:
        return not self._spent or self._spent + units <= TURN_UNITS

    def _charge(self, units: int) -> None:
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._spent += units

    def _next_turn(self) -> None:
        self._spent = 0
        while self._waiting and self._has_room(self._waiting[0][0]):
            units, place = self._waiting.popleft()
            # It is done already if its request was cancelled.
            if not place.done():
                # Before the charge, which schedules the next turn: the work is then done first.
                place.set_result(None)
                self._charge(units)
