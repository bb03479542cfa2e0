"""Clients that send one request after another, each response compared with its expectation."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from scripts.faults.service.client import ChaosClient, Seen
from scripts.faults.verdicts.oracle import Oracle
from scripts.faults.verdicts.verdict import RowResult

PAUSE_S: Final = 0.05
REFUSALS: Final = (429, 503)


class Load:
    """Clients that send one request after another, each judged when it ends.

    ``refusals_allowed``: for now, a refusal with Retry-After is not a failure.
    """

    def __init__(
        self, client: ChaosClient, oracle: Oracle, result: RowResult, *, streams: int
    ) -> None:
        self._client = client
        self._oracle = oracle
        self._result = result
        self._streams = streams
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.seen: dict[int, Seen] = {}
        """The last request of each client."""
        self.ended: list[Seen] = []
        """All ended requests, until the list is cleared."""
        self.refusals_allowed = False

    def start(self) -> None:
        self._stopping = False
        self._tasks = [asyncio.create_task(self._work(n)) for n in range(self._streams)]

    async def stop(self) -> None:
        """Let each client finish its current request."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def abandon(self) -> None:
        """Close all connections, since the service is gone."""
        for task in self._tasks:
            task.cancel()

    def streaming(self, owners: Sequence[int]) -> list[Seen]:
        """Streams in progress with one response whose first owner is one of these."""
        return [
            seen
            for seen in self.seen.values()
            if seen.running and seen.owner in owners and seen.ask.n == 1
        ]

    async def wait_for(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Poll a condition of the clients, which send no event; False on time-out."""
        ends = asyncio.get_running_loop().time() + timeout_s
        while not holds():
            if asyncio.get_running_loop().time() > ends:
                return False
            await asyncio.sleep(0.002)
        return True

    async def _work(self, client: int) -> None:
        while not self._stopping:
            seen = Seen(self._oracle.draw_form())
            self.seen[client] = seen
            # A request sent during a fault may fail after the fault is over.
            allowed = self.refusals_allowed
            await self._client.stream(seen.ask, seen)
            refused = seen.status in REFUSALS and seen.retry_after and not seen.text
            if refused and (allowed or self.refusals_allowed):
                self._result.refused += 1
                await asyncio.sleep(PAUSE_S)
                continue
            self.ended.append(seen)
            self._result.take(seen, self._oracle.expected(seen.ask))
            if seen.error:
                await asyncio.sleep(PAUSE_S)
