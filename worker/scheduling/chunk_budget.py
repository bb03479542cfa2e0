"""Prompt tokens per step, limited so that running streams do not stall behind a prompt."""

from typing import Final

MIN_CHUNK_TOKENS: Final = 32
"""A smaller chunk costs nearly as much as this one, since it reads all weights as well."""
FIRST_CHUNK_TOKENS: Final = 512
"""The limit before the first measured step: until then the controller can only guess its duration.
"""
LONGEST_CHUNK_S: Final = 20.0
"""A longer chunk gains nothing by its size, and delays the detection of a hang."""
DEFAULT_SLOWDOWN: Final = 1.5
MAX_SLOWDOWN: Final = 2.25
"""The limit for any number of waiting requests. The target is 2.5 at the 99th percentile."""
_NEWEST: Final = 0.25
"""The weight of the newest observation; the device's speed drifts with contexts and heat."""
_STALL: Final = 2.0
"""A decode that takes longer than this multiple of the estimate was disturbed, by other work or by
a sleeping machine. It counts only as this multiple, or one such step would open the budget.
Outliers that reduce the budget count in full.
"""
_GROWTH: Final = 2


class ChunkBudget:
    """Limits a step with prompt tokens to about ``slowdown`` times a step without.

    It estimates the seconds of a decode alone and of a prompt token from measured steps. A chunk
    smaller than ``MIN_CHUNK_TOKENS`` does not count: most of its time is the fixed cost of a pass.
    When no request decodes, no stream waits, and a step takes up to ``max_tokens``, if they take at
    most ``LONGEST_CHUNK_S``. The more requests wait for each one that decodes, the longer a step
    may take, up to ``MAX_SLOWDOWN``: smooth streams for a few are not worth an idle batch.
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
        """Return the prompt tokens for the next step, by the numbers of decoding and waiting
        requests.
        """
        if decoding == 0:
            return self._without_decode()
        if self._decode_s is None or self._token_s is None:
            return self._min_tokens
        spare = (self._slowdown - 1.0) * max(1.0, waiting / decoding)
        spare_s = self._decode_s * min(spare, MAX_SLOWDOWN - 1.0)
        wanted = spare_s / self._token_s if self._token_s > 0.0 else float(self._max_tokens)
        # The first observations may be wrong, so the budget grows only from sizes that ran.
        ceiling = min(self._max_tokens, self._proven * _GROWTH)
        return max(self._min_tokens, int(min(wanted, ceiling)))

    def _without_decode(self) -> int:
        """Return the prompt tokens of a step in which no request decodes."""
        if self._token_s is None:
            return min(self._max_tokens, FIRST_CHUNK_TOKENS)
        if self._token_s * self._max_tokens <= LONGEST_CHUNK_S:
            return self._max_tokens
        return max(self._min_tokens, int(LONGEST_CHUNK_S / self._token_s))

    def observe(self, duration_s: float, *, prefilled: int, decoded: int) -> None:
        """Update the estimates with a measured step: seconds, prompt tokens, decoded rows."""
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
            prefill_s = max(0.0, duration_s - self._decode_s)
            self._token_s = _blend(self._token_s, prefill_s / prefilled)


def _blend(known: float | None, observed: float) -> float:
    return observed if known is None else known + _NEWEST * (observed - known)
