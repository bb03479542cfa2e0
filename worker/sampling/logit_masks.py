"""Masks of logits: a grammar's tokens, stop tokens of short answers, top-k, top-p and min-p."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import mlx.core as mx

from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.grammar.masks import RowMasks

_WORD: Final = 32
# Far beyond any logit, and still finite after a division by the smallest temperature.
_HUGE: Final = 1e30


def apply_masks(logits: mx.array, masks: RowMasks) -> mx.array:
    """Set the logits [rows, vocab] of tokens that a row's mask excludes to -inf.

    Logits of allowed tokens become finite, so one of them is drawn even if the model returns NaN.
    """
    vocab_size = logits.shape[-1]
    words = mx.array(masks.bits)
    assert words.shape[-1] * _WORD >= vocab_size, (words.shape, vocab_size)
    bits = (words[:, :, None] >> mx.arange(_WORD, dtype=mx.int32)) & 1
    allowed = bits.reshape(len(masks.rows), -1)[:, :vocab_size].astype(mx.bool_)
    all_rows = len(masks.rows) == logits.shape[0]
    index = mx.array(masks.rows, dtype=mx.int32)
    own = mx.nan_to_num(logits if all_rows else logits[index])
    own = mx.where(allowed, mx.clip(own, -_HUGE, _HUGE), -mx.inf)
    if all_rows:
        return own
    edited = mx.array(logits)  # the assignment would change the caller's array
    edited[index] = own
    return edited


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


def filter_logits(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Mask all tokens of [rows, vocab] that a row's filters exclude, with -inf.

    ``logits`` are already divided by the temperature. top_k 0, top_p 1 and min_p 0 keep all.
    top_p applies within the top_k best, and keeps the token that crosses the mass. Tokens equal to
    the last one kept are kept too. The best token is always kept.
    """
    thresholds: list[mx.array] = []
    if any(p.min_p for p in params):
        floor = mx.log(mx.array([p.min_p for p in params]))[:, None]  # log(0) = -inf keeps all
        thresholds.append(mx.max(logits, axis=-1, keepdims=True) + floor)
    if any(p.top_k or p.top_p < 1.0 for p in params):
        thresholds.append(_rank_threshold(logits, params))
    if not thresholds:
        return logits
    return mx.where(logits >= reduce(mx.maximum, thresholds), logits, -mx.inf)


def _rank_threshold(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Return the smallest logit [rows, 1] that the row keeps under top_k and top_p."""
    vocab = logits.shape[-1]
    top_k = [min(p.top_k, vocab) for p in params]
    # Sorting the whole vocabulary is the most expensive part of a step, so only without top_k.
    width = max(top_k) if all(top_k) else vocab
    best = logits if width >= vocab else mx.topk(logits, width, axis=-1)
    ranked = mx.sort(best, axis=-1)[:, ::-1]
    width = ranked.shape[-1]
    ranks = mx.arange(width)[None]
    limits = mx.array([k or vocab for k in top_k])[:, None]
    within = ranks < limits
    probabilities = mx.softmax(mx.where(within, ranked, -mx.inf), axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    mass = mx.array([p.top_p for p in params])[:, None]
    # top_p 1 keeps all, whatever the rounding of the sum; one that rounds to 0 keeps the best.
    kept = within & ((before < mass) | (mass >= 1.0) | (ranks == 0))
    return mx.min(mx.where(kept, ranked, mx.inf), axis=-1, keepdims=True)
