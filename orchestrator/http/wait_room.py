"""Waiting for one of few processes, within bounds of number and time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from mlx_dp.orchestrator.openai.errors import ApiError, overloaded
from mlx_dp.orchestrator.service import RETRY_BUSY_S

MAX_WAITING: Final = 64
LIMIT_S: Final = 10.0


class WaitRoom:
    """At most ``most`` requests wait here at a time, each of them ``limit_s`` at most.

    ``what`` they wait for, in the words of the 429 that the others get.
    """

    def __init__(self, what: str, *, most: int = MAX_WAITING, limit_s: float = LIMIT_S) -> None:
        self._what = what
        self._most = most
        self._limit_s = limit_s
        self.waiting = 0

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Count as waiting inside. Raises ApiError."""
        if self.waiting >= self._most:
            raise self._full()
        self.waiting += 1
        try:
            async with asyncio.timeout(self._limit_s):
                yield
        except TimeoutError as error:
            raise self._full() from error
        finally:
            self.waiting -= 1

    def _full(self) -> ApiError:
        return overloaded(429, f"too many {self._what} are under way", retry_after_s=RETRY_BUSY_S)
