"""Runs work while its client is connected."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from starlette.types import Receive

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client disconnected before its response was complete. It gets no answer."""


async def while_connected(
    receive: Receive,
    work: Coroutine[object, object, T],
    *,
    tick: Callable[[], Awaitable[float]] | None = None,
) -> T:
    """Return the result of ``work``, or cancel it and raise ClientGoneError on a disconnect.

    ``tick`` is called once at the beginning and again after as many seconds as it returned. It
    costs nothing per token, unlike a timeout around each event.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        timeout = None if tick is None else await tick()
        while not task.done():
            if gone.done():
                await _end(task)
                _log_failure(task)
                raise ClientGoneError
            done, _ = await asyncio.wait(
                (task, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not done and tick is not None:
                timeout = await tick()
        return task.result()
    finally:
        await _end(task)
        await _end(gone)


def _log_failure(task: asyncio.Future[T]) -> None:
    """Log a failure that the disconnect hides from the caller."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("work for a disconnected client ended with %r", error)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[T]) -> None:
    """Cancel and wait, so that nothing of the request outlives it."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        # Mark it as retrieved: the caller raises the same, or its client is gone.
        task.exception()
