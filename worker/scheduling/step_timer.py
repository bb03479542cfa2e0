"""Measures the time of steps, although a step's tokens are read one call later."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The work of a finished step, and its time on the device."""

    duration_s: float
    prefilled: int
    decoded: int


@dataclass(frozen=True, slots=True)
class _Launched:
    """The step under way. ``since`` is the best estimate of when the device began it."""

    since: float
    prefilled: int
    decoded: int


class StepTimer:
    """Measures from the end of one call to the end of the next.

    A call launches a step and returns when the previous step is done. So on a device whose launch
    does not block, the time between two returns is that of the previous step. On a device whose
    launch ``blocks`` until the step is nearly done, it is that of the step itself. A device may
    change between the two; the time between two returns around a change belongs to two steps or to
    none, and is not used.
    """

    def __init__(self) -> None:
        self._blocks = False
        self._launched: _Launched | None = None
        self._returned_at: float | None = None

    def returned(
        self, called_at: float, now: float, *, prefilled: int, decoded: int, blocks: bool
    ) -> StepTime | None:
        """Record the times of a call that launched a step; return the measured step, if any."""
        before, changed = self._launched, blocks is not self._blocks
        self._launched = _Launched(
            since=called_at if before is None else now, prefilled=prefilled, decoded=decoded
        )
        timed = before
        if blocks:
            since = called_at if self._returned_at is None else self._returned_at
            timed = _Launched(since=since, prefilled=prefilled, decoded=decoded)
        self._blocks, self._returned_at = blocks, now
        if before is not None and changed:
            return None
        if timed is None or timed.prefilled + timed.decoded == 0:
            return None
        return StepTime(
            duration_s=now - timed.since, prefilled=timed.prefilled, decoded=timed.decoded
        )

    @property
    def prefilling(self) -> int:
        """Prompt tokens in the step that was launched last, if it may still be under way."""
        if self._blocks or self._launched is None:
            return 0
        return self._launched.prefilled

    def idle(self) -> None:
        """Stop measuring: no step is under way, so the time from here on belongs to none."""
        self._launched = None
        self._returned_at = None
