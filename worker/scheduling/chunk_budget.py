"""Prompt tokens per step, limited so that running streams do not stall behind a prompt."""

from typing import Final

MIN_CHUNK_TOKENS: Final = 32
"""A smaller chunk costs nearly as much as this one, since it reads all weights as well."""
FIRST_CHUNK_TOKENS: Final = 512
"""The most until a step was measured: the controller can only guess how long such a step takes."""
LONGEST_CHUNK_S: Final = 20.0
"""A chunk that takes longer gains nothing by its size, and delays the notice of a hang."""
DEFAULT_SLOWDOWN: Final = 1.5
MAX_SLOWDOWN: Final = 2.25
"""However many wait. The target is 2.5 at the 99th percentile, and steps vary."""
_NEWEST: Final = 0.25
"""The weight of the newest observation; the device's speed drifts with contexts and heat."""
_STALL: Final = 2.0
"""A decode of more than this times what is known was not alone: other work, or a machine that
slept. It counts as this much, or one such step would open the budget. One that closes it may."""
_GROWTH: Final = 2


class ChunkBudget:
    """Holds a step that carries prompt tokens near ``slowdown`` times one that does not.

    Learns the seconds of a decode alone and of a prompt token from the steps that ran; a chunk
    below the least tells nothing of a token, since nearly all of its seconds are the pass. With
    nothing decoding, no stream waits, and a step takes ``max_tokens``, once one was measured and if
    they take at most ``LONGEST_CHUNK_S``. The more requests wait for each one that decodes, the
    longer a step may take, up to ``MAX_SLOWDOWN``: smooth streams for a few are not worth an idle
    batch.
    """

    def __init__(self, max_tokens: int, *, slowdown: float = DEFAULT_SLOWDOWN) -> None:
        assert max_tokens >= 1, max_tokens
        assert 1.0 < slowdown <= MAX_SLOWDOWN, slowdown
        self._max_tokens = max_tokens
        self._min_tokens = min(MIN_CHUNK_TOKENS, max_tokens)
        self._slowdown = slowdown
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._proven = self._min_tokens

    def tokens(self, *, decoding: int, waiting: int) -> int:
        """Prompt tokens for the next step, given the requests that decode and that wait."""
        if decoding == 0:
            return self._alone()
        if self._decode_s is None or self._token_s is None:
            return self._min_tokens
        spare = (self._slowdown - 1.0) * max(1.0, waiting / decoding)
        spare_s = self._decode_s * min(spare, MAX_SLOWDOWN - 1.0)
        wanted = spare_s / self._token_s if self._token_s > 0.0 else float(self._max_tokens)
        # The first observations may be wrong: open the budget in steps that are seen to work.
        ceiling = min(self._max_tokens, self._proven * _GROWTH)
        return max(self._min_tokens, int(min(wanted, ceiling)))

    def _alone(self) -> int:
        """Prompt tokens of a step for which no stream waits."""
        if self._token_s is None:
            return min(self._max_tokens, FIRST_CHUNK_TOKENS)
        if self._token_s * self._max_tokens <= LONGEST_CHUNK_S:
            return self._max_tokens
        return max(self._min_tokens, int(LONGEST_CHUNK_S / self._token_s))

    def observe(self, duration_s: float, *, prefilled: int, decoded: int) -> None:
        """Learn from a step that ran: its seconds, its prompt tokens, the rows it decoded."""
        if prefilled == 0:
            if decoded:
                known = self._decode_s
                likely_s = duration_s if known is None else min(duration_s, _STALL * known)
                self._decode_s = _blend(known, likely_s)
            return
        if decoded == 0:
            if prefilled >= self._min_tokens:
                self._token_s = _blend(self._token_s, duration_s / prefilled)
            return
        self._proven = max(self._proven, prefilled)
        if self._decode_s is None and self._token_s is not None:
            self._decode_s = max(0.0, duration_s - prefilled * self._token_s)
        elif self._decode_s is not None and prefilled >= self._min_tokens:
            rest_s = max(0.0, duration_s - self._decode_s)
            self._token_s = _blend(self._token_s, rest_s / prefilled)


def _blend(known: float | None, observed: float) -> float:
    return observed if known is None else known + _NEWEST * (observed - known)
