"""How long a prompt token takes in this worker, as an upper estimate."""

from typing import Final

from mlx_dp.worker.scheduling.chunk_budget import MIN_CHUNK_TOKENS

_FALL: Final = 0.5
"""The weight of a step that was faster than the estimate. A slower one counts in full."""
_MAX_RISE: Final = 4.0
"""One step raises the estimate by this factor at most: it may have been stopped in between."""


class PrefillPace:
    """Estimates the seconds of one prompt token from the steps that ran.

    The controller allows a step that is under way time by this estimate, so it errs towards slow:
    a step counts with all that it did, its decodes included, and slow steps count more than fast
    ones. Steps below ``MIN_CHUNK_TOKENS`` say nothing of a token, since nearly all of their
    seconds are the pass.
    """

    def __init__(self) -> None:
        self._token_s: float | None = None

    @property
    def token_s(self) -> float | None:
        """Seconds of one prompt token, or None while no step was measured."""
        return self._token_s

    def observe(self, duration_s: float, tokens: int) -> None:
        """Learn from a step that computed this many prompt tokens."""
        if tokens < MIN_CHUNK_TOKENS:
            return
        observed, known = duration_s / tokens, self._token_s
        if known is None:
            self._token_s = observed
        elif observed >= known:
            self._token_s = min(observed, _MAX_RISE * known)
        else:
            self._token_s = known + _FALL * (observed - known)
