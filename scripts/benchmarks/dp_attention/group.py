"""Ranks of a group as processes, each with the real start-up, which execute orders."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from scripts.benchmarks.serving.server import BLAS, free_port

_PROGRAM: Final = ("-m", "scripts.benchmarks.dp_attention.rank")
_PATIENCE_S: Final = 180.0
"""A rank that waits for a dead rank waits for ever, so orders time out."""


class RankError(Exception):
    """A rank ended, or did not answer in time."""


class Ranks:
    """Processes that execute one order each at a time. Made by ``started``."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    @property
    def size(self) -> int:
        return len(self._processes)

    async def order(self, rank: int, **order: Any) -> Any:
        """Order one rank to do something, and return its answer."""
        process = self._processes[rank]
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self.answer(rank)

    async def order_all(self, orders: Sequence[dict[str, Any] | None]) -> list[Any]:
        """Send each rank its order, or none, at once, and wait for all answers."""
        given = [self.order(rank, **order) for rank, order in enumerate(orders) if order]
        return list(await asyncio.gather(*given))

    async def answer(self, rank: int) -> Any:
        output = self._processes[rank].stdout
        assert output is not None
        try:
            line = await asyncio.wait_for(output.readline(), _PATIENCE_S)
        except TimeoutError:
            raise RankError(f"rank {rank} did not answer in {_PATIENCE_S:g} s") from None
        if not line:
            raise RankError(f"rank {rank} ended with {await self._processes[rank].wait()}")
        return json.loads(line)


@contextlib.asynccontextmanager
async def started(model: Path, size: int) -> AsyncIterator[tuple[Ranks, list[int]]]:
    """Ranks that are loaded and warm, and the bytes of weights that each holds.

    They have the BLAS threads that ``serve`` would give them.
    """
    environment = dict(os.environ)
    environment["OPENBLAS_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // size))
    if sys.platform == "linux":
        environment["LD_PRELOAD"] = BLAS
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        place = {
            "model": str(model),
            "memory_nbytes": psutil.virtual_memory().available // (2 * size),
            "addresses": [f"127.0.0.1:{free_port()}" for _ in range(size)],
            "peers": [f"ipc://{folder}/{rank}" for rank in range(size)],
        }
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, *_PROGRAM, json.dumps({**place, "rank": rank})),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=2**24,
            )
            for rank in range(size)
        ]
        try:
            ranks = Ranks(processes)
            ready = await asyncio.gather(*[ranks.answer(rank) for rank in range(size)])
            yield ranks, [answer["weights_nbytes"] for answer in ready]
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()
