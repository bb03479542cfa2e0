"""Bounds for all requests together: on waiting for few processes, and on the memory of bodies."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from mlx_dp.orchestrator.api import RETRY_BUSY_S
from mlx_dp.orchestrator.formats.common.errors import ApiError, closing, overloaded

MAX_WAITING: Final = 64
MAX_WAIT_S: Final = 10.0
FREE_NBYTES: Final = 64 * 2**10
"""The first bytes of each body are not counted, so that large bodies never block small ones."""


class ConcurrencyLimit:
    """Lets ``max_waiting`` requests wait for one of few processes, each ``limit_s`` at most.

    ``resource`` names what they wait for in the 429 that further requests get.
    """

    def __init__(
        self, resource: str, *, max_waiting: int = MAX_WAITING, limit_s: float = MAX_WAIT_S
    ) -> None:
        self._resource = resource
        self._max_waiting = max_waiting
        self._limit_s = limit_s
        self.waiting = 0

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Count as waiting while the context is open. Raises ApiError."""
        if self.waiting >= self._max_waiting:
            raise self._exceeded()
        self.waiting += 1
        try:
            async with asyncio.timeout(self._limit_s):
                yield
        except TimeoutError as error:
            raise self._exceeded() from error
        finally:
            self.waiting -= 1

    def _exceeded(self) -> ApiError:
        message = f"too many {self._resource} are in progress"
        return overloaded(429, message, retry_after_s=RETRY_BUSY_S)


class MemoryLimit:
    """Bounds the memory that the bodies of all requests take together.

    Invariant: ``held_nbytes`` is the size of all open reservations beyond their free part.
    """

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
