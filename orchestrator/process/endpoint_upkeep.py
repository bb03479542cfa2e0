"""Keeps the workers' endpoint usable while the service runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, NoReturn

INTERVAL_S: Final = 10.0

_logger = logging.getLogger(__name__)


@asynccontextmanager
async def endpoint_kept(
    keep: Callable[[], None], *, interval_s: float = INTERVAL_S
) -> AsyncIterator[None]:
    """Call ``keep`` periodically. Log each distinct OSError once: running workers go on."""
    task = asyncio.create_task(_keep_on(keep, interval_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _keep_on(keep: Callable[[], None], interval_s: float) -> NoReturn:
    told = ""
    while True:
        await asyncio.sleep(interval_s)
        try:
            keep()
        except OSError as error:
            if str(error) != told:
                _logger.warning("%s; no worker can be started until it is back", error)
            told = str(error)
        else:
            told = ""
