"""Waiting in a coroutine for something that plain code brings about."""

import asyncio
from collections.abc import Callable
from typing import Final

Predicate = Callable[[], bool]


class AwaitablePredicates:
    """Wakes coroutines whose predicate has become true. ``check`` runs after every change."""

    def __init__(self) -> None:
        self._waiting: Final[dict[asyncio.Future[None], Predicate]] = {}

    def check(self) -> None:
        """Wake whoever waits for what is now the case."""
        for future, predicate in tuple(self._waiting.items()):
            if not future.done() and predicate():
                future.set_result(None)

    async def wait(self, predicate: Predicate, timeout_s: float | None = None) -> bool:
        """Wait until it holds, and return True; False once the time is up."""
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
