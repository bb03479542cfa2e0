"""How much of one turn of the event loop the writing of answers may take."""

import asyncio
from collections import deque
from typing import Final

TURN_UNITS: Final = 4096
"""A unit is a log-probability: about a microsecond to write, and as long to collect its garbage."""


class LoopShare:
    """Spreads the work for all answers over turns of the event loop, first come, first served.

    Whoever took units works them off before it next waits for anything. At most twice
    ``TURN_UNITS`` are then worked off in one turn, or one portion if that is larger. Invariant:
    while somebody waits, ``_turn`` is going to be called.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, units: int) -> None:
        """Return when so much may be done."""
        assert units > 0, units
        if not self._waiting and self._fits(units):
            self._count(units)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, place))
        await place

    def _fits(self, units: int) -> bool:
        return not self._taken or self._taken + units <= TURN_UNITS

    def _count(self, units: int) -> None:
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._turn)
        self._taken += units

    def _turn(self) -> None:
        self._taken = 0
        while self._waiting and self._fits(self._waiting[0][0]):
            units, place = self._waiting.popleft()
            # It is done already if its request was cancelled.
            if not place.done():
                # First: it works its units off before the next turn is called.
                place.set_result(None)
                self._count(units)
