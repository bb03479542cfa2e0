"""A budget for the work on answers in one turn of the event loop, and the slices that fit it.

A slice delays the loop by a few milliseconds.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from mlx_dp.orchestrator.api import NewTokens
from mlx_dp.orchestrator.text.choice_text import Piece
from mlx_dp.proto.messages.events import TokenLogprob

TURN_UNITS: Final = 4096
"""A unit is a log-probability: about a microsecond to write, and as long to collect its garbage."""
TOKEN_UNITS: Final = 8
"""The cost of a token's text, without its log-probabilities."""


class YieldBudget:
    """Spreads the work for all answers over turns of the event loop, first come, first served.

    Right after ``spend``, a caller does that work, before it awaits anything else. So the work in
    one turn is at most twice ``TURN_UNITS``, or one portion if that is larger. Invariant: while a
    caller waits, a call of ``_next_turn`` is scheduled.
    """

    def __init__(self) -> None:
        self._spent = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def spend(self, units: int) -> None:
        """Wait for a turn that has room for this much work."""
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
            # The future is done already if its request was cancelled.
            if not place.done():
                # Before the charge, which schedules the next turn, so that the work precedes it.
                place.set_result(None)
                self._charge(units)


def token_units(event: NewTokens) -> int:
    """Return the cost of writing the tokens, in the units of ``YieldBudget``."""
    return len(event.ids) * _units(event.logprobs[0] if event.logprobs else None)


def piece_units(piece: Piece) -> int:
    """Return the cost of writing a piece, whose tokens may have arrived long ago."""
    return len(piece.logprobs) * _units(piece.logprobs[0].logprob) if piece.logprobs else 1


def token_slices(event: NewTokens) -> Sequence[NewTokens]:
    """Divide an event. It has many tokens if its reader was slow."""
    if token_units(event) <= TURN_UNITS:
        return (event,)
    size = max(1, TURN_UNITS * len(event.ids) // token_units(event))
    return [
        NewTokens(ids=event.ids[at : at + size], logprobs=event.logprobs[at : at + size])
        for at in range(0, len(event.ids), size)
    ]


def piece_slices(piece: Piece) -> Sequence[Piece]:
    """Divide a piece. It has many tokens if most had no text: those wait for the next text."""
    if piece_units(piece) <= TURN_UNITS:
        return (piece,)
    size = max(1, TURN_UNITS * len(piece.logprobs) // piece_units(piece))
    return [
        Piece(
            piece.text if at == 0 else "",
            piece.logprobs[at : at + size],
            piece.ids if at == 0 else (),
        )
        for at in range(0, len(piece.logprobs), size)
    ]


def _units(logprob: TokenLogprob | None) -> int:
    return TOKEN_UNITS if logprob is None else TOKEN_UNITS + 1 + len(logprob.top)
