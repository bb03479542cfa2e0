"""An upper estimate of the time of one prompt token in this worker."""

from typing import Final

from mlx_dp.worker.scheduling.chunk_budget import MIN_CHUNK_TOKENS

_FALL: Final = 0.5
"""The weight of a step that was faster than the estimate. A slower step counts in full."""
_MAX_RISE: Final = 4.0
"""One step raises the estimate by at most this factor: the process may have been stopped."""


class PrefillPace:
    """Estimates the seconds of one prompt token from measured steps.

    The controller's time limit for a step under way depends on this estimate, so it errs towards
    slow: the whole time of a step counts, its decodes included, and slow steps count more than fast
    ones. Steps below ``MIN_CHUNK_TOKENS`` do not count: most of their time is the fixed cost of a
    pass.
    """

    def __init__(self) -> None:
        self._token_s: float | None = None

    @property
    def token_s(self) -> float | None:
        """Seconds of one prompt token; None: no step was measured yet."""
        return self._token_s

    def observe(self, duration_s: float, tokens: int) -> None:
        """Update the estimate with a step that computed ``tokens`` prompt tokens."""
        if tokens < MIN_CHUNK_TOKENS:
            return
        observed, known = duration_s / tokens, self._token_s
        if known is None:
            self._token_s = observed
        elif observed >= known:
            self._token_s = min(observed, _MAX_RISE * known)
        else:
            self._token_s = known + _FALL * (observed - known)
