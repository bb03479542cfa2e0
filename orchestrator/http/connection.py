"""Runs work for as long as its client is there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from starlette.types import Receive

from mlx_dp.orchestrator.http.body import ClientGoneError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def while_connected(
    receive: Receive,
    work: Coroutine[object, object, T],
    *,
    tick: Callable[[], Awaitable[float]] | None = None,
) -> T:
    """Return what ``work`` returns; when the client leaves, cancel it and raise ClientGoneError.

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
                _report(task)
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


def _report(task: asyncio.Future[T]) -> None:
    """The client's leaving hides how the work ended, so the log has it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("work for a client that left ended with %r", error)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[T]) -> None:
    """Cancel and wait, so that nothing of the request outlives it."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        # Mark it as seen: the caller raises the same, or its client is gone.
        task.exception()
