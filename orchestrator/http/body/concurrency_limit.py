"""A bound on the requests that wait for one of few processes, and on their time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from mlx_dp.orchestrator.api import RETRY_BUSY_S
from mlx_dp.orchestrator.formats.common.errors import ApiError, overloaded

MAX_WAITING: Final = 64
LIMIT_S: Final = 10.0


class ConcurrencyLimit:
    """Lets ``max_waiting`` requests wait at a time, each of them for ``limit_s`` at most.

    ``resource`` names what they wait for in the 429 that further requests get.
    """

    def __init__(
        self, resource: str, *, max_waiting: int = MAX_WAITING, limit_s: float = LIMIT_S
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
