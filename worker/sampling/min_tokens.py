"""Masks stop tokens in rows whose answers are too short."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_dp.worker.contract.engine import EngineRequest


@dataclass(frozen=True, slots=True)
class _ShortRow:
    """A batch row that may draw none of ``stops`` at positions below ``until``."""

    row: int
    until: int
    stops: tuple[int, ...]


class MinTokens:
    """Masks the stop tokens of rows until their answers have ``min_tokens`` tokens.

    Positions count the tokens of an earlier owner, so a replay masks the same draws. Rows with a
    grammar are left out: their own masks allow a stop token when nothing else can follow.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: tuple[_ShortRow, ...] = ()
        self._active: tuple[_ShortRow, ...] = ()
        self._index: tuple[mx.array, mx.array] | None = None

    def set_rows(self, requests: Sequence[EngineRequest]) -> None:
        """Take the batch's rows."""
        self._rows = tuple(
            _ShortRow(row, len(request.prompt_ids) + request.params.min_tokens, stops)
            for row, request in enumerate(requests)
            if request.params.min_tokens
            and request.grammar is None
            # A model's own stop tokens may lie beyond its logits.
            and (stops := tuple(t for t in request.stop_token_ids if t < self._vocab_size))
        )
        self._active, self._index = (), None

    def apply(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Mask logits [rows, vocab] for draws at these positions."""
        # Positions only grow, so a row that is done stays done.
        self._rows = tuple(short for short in self._rows if positions[short.row] < short.until)
        if not self._rows:
            return logits
        if self._index is None or self._rows != self._active:
            self._active, self._index = self._rows, _index(self._rows)
        rows, ids = self._index
        edited = mx.array(logits)  # the assignment would change the caller's array
        edited[rows, ids] = -mx.inf
        return edited


def _index(short_rows: Sequence[_ShortRow]) -> tuple[mx.array, mx.array]:
    entries = [(short.row, token) for short in short_rows for token in short.stops]
    rows, ids = zip(*entries, strict=True)
    return mx.array(rows, dtype=mx.int32), mx.array(ids, dtype=mx.int32)
