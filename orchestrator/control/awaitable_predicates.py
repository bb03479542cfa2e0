"""Awaitable predicates over synchronous state."""

import asyncio
from collections.abc import Callable
from typing import Final

Predicate = Callable[[], bool]


class AwaitablePredicates:
    """Wakes coroutines whose predicate has become true. Call ``wake`` after every change."""

    def __init__(self) -> None:
        self._waiting: Final[dict[asyncio.Future[None], Predicate]] = {}

    def wake(self) -> None:
        """Wake the coroutines whose predicate is true now."""
        for future, predicate in tuple(self._waiting.items()):
            if not future.done() and predicate():
                future.set_result(None)

    async def wait(self, predicate: Predicate, timeout_s: float | None = None) -> bool:
        """Wait until the predicate is true, and return True; False after the time-out."""
        if predicate():
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = predicate
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return predicate()
        finally:
            del self._waiting[future]
        return True
