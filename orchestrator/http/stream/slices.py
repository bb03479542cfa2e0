"""Divides tokens into portions that delay the event loop by a few milliseconds each."""

from collections.abc import Sequence
from typing import Final

from mlx_dp.orchestrator.api import NewTokens
from mlx_dp.orchestrator.http.stream.yield_budget import TURN_UNITS
from mlx_dp.orchestrator.text.choice_text import Piece
from mlx_dp.proto.messages.events import TokenLogprob

TOKEN_UNITS: Final = 8
"""The cost of a token's text, without its log-probabilities."""


def token_units(event: NewTokens) -> int:
    """Return the cost of writing the tokens, in the units of ``YieldBudget``."""
    return len(event.ids) * _units(event.logprobs[0] if event.logprobs else None)


def piece_units(piece: Piece) -> int:
    """The same for a piece, whose tokens may have arrived long ago."""
    return len(piece.logprobs) * _units(piece.logprobs[0].logprob) if piece.logprobs else 1


def token_slices(event: NewTokens) -> Sequence[NewTokens]:
    """Divide an event that has many tokens, because its reader was slow."""
    if token_units(event) <= TURN_UNITS:
        return (event,)
    size = max(1, TURN_UNITS * len(event.ids) // token_units(event))
    return [
        NewTokens(ids=event.ids[at : at + size], logprobs=event.logprobs[at : at + size])
        for at in range(0, len(event.ids), size)
    ]


def piece_slices(piece: Piece) -> Sequence[Piece]:
    """Divide a piece that has many tokens, since those without text wait for the next text."""
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
