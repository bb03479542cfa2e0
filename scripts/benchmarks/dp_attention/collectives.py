"""Timing of this process's collectives, one after another."""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx


class CollectiveClock:
    """Wraps MLX's collectives, to measure their time.

    While tracing, each is evaluated separately: its inputs are waited for first, so that its
    time is exchange and waiting for later ranks. That ends all overlap, so traced passes are
    slower than others.
    """

    def __init__(self) -> None:
        self._tracing = False
        self._took_s: list[float] = []

    def install(self) -> None:
        for name in ("all_gather", "all_sum"):
            setattr(mx.distributed, name, self._timed(getattr(mx.distributed, name)))

    def begin(self, *, trace: bool) -> None:
        self._tracing = trace
        self._took_s = []

    def end(self) -> list[float]:
        """Return each collective's seconds since ``begin``, in the order shared by all ranks."""
        self._tracing = False
        return self._took_s

    def _timed(self, collective: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(rows: mx.array, *arguments: Any, **named: Any) -> mx.array:
            if not self._tracing:
                return collective(rows, *arguments, **named)
            mx.eval(rows)
            began = time.perf_counter()
            result = collective(rows, *arguments, **named)
            mx.eval(result)
            self._took_s.append(time.perf_counter() - began)
            return result

        return call
