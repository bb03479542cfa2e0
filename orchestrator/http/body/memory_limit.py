"""A bound on the memory that the bodies of all requests take together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mlx_dp.orchestrator.api import RETRY_BUSY_S
from mlx_dp.orchestrator.formats.common.errors import closing, overloaded

FREE_NBYTES: Final = 64 * 2**10
"""The first bytes of each body are not counted, so that large bodies never block small ones."""


class MemoryLimit:
    """Invariant: ``held_nbytes`` is the size of all open reservations beyond their free part."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self.held_nbytes = 0

    @contextmanager
    def reserve(self) -> Iterator[Callable[[int], None]]:
        """Give a function that adds a chunk to the reservation, which ends with the context.

        The function raises ApiError when the limit is exceeded.
        """
        size = counted = 0

        def grow(nbytes: int) -> None:
            nonlocal size, counted
            size += nbytes
            more = max(0, size - FREE_NBYTES) - counted
            if more and self.held_nbytes + more > self._max_nbytes:
                message = "too many large bodies are in progress"
                raise closing(overloaded(429, message, retry_after_s=RETRY_BUSY_S))
            counted += more
            self.held_nbytes += more

        try:
            yield grow
        finally:
            self.held_nbytes -= counted
