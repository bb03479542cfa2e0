"""SIGKILL of a worker that streams: the times until its streams resume and all owners serve."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise

from scripts.benchmarks.serving.client import Request, Stream
from scripts.benchmarks.serving.scenarios import POLL_S, WARM_CHUNKS, Measures, all_have, cancel_all
from scripts.benchmarks.serving.server import Server

HEALED_TIMEOUT_S = 120.0


async def kill_worker(server: Server, running: Sequence[Request]) -> Measures:
    """Kill the worker of the first of several streams.

    ``next_token_s`` is of that worker's streams, ``others_gap_s`` the longest gap of all
    others.
    """
    seen = [Stream() for _ in running]
    tasks = [
        asyncio.create_task(server.client.stream(request, stream))
        for request, stream in zip(running, seen, strict=True)
    ]
    try:
        await all_have(seen, WARM_CHUNKS, tasks)
        victim = seen[0].owner
        assert victim is not None, "the server does not name the owner of a response"
        pid = (await _ready_pids(server))[victim]
        assert pid is not None, f"worker {victim} streams and is not ready"
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        before = [len(stream.chunks_s) for stream in seen]
        await _all_go_on(seen, before, tasks)
    finally:
        await cancel_all(tasks)
    gaps = [longest_gap(stream, killed_s) for stream in seen]
    own = [gap for gap, stream in zip(gaps, seen, strict=True) if stream.owner == victim]
    others = [gap for gap, stream in zip(gaps, seen, strict=True) if stream.owner != victim]
    healed_s = await _healed(server, gone=pid)
    return {
        "next_token_s": max(after - killed_s for _, after in own),
        "streams": len(own),
        "others_gap_s": max((after - begun for begun, after in others), default=float("nan")),
        "healed_s": healed_s - killed_s,
    }


async def _all_go_on(
    streams: Sequence[Stream], before: Sequence[int], tasks: Sequence[asyncio.Task[Stream]]
) -> None:
    """Wait for more tokens than those of the dead worker that may still be in flight."""
    while any(
        len(stream.chunks_s) < count + WARM_CHUNKS
        for stream, count in zip(streams, before, strict=True)
    ):
        for task in tasks:
            if task.done():
                raise RuntimeError(f"a stream did not survive its worker: {task.result()}")
        await asyncio.sleep(POLL_S)


def longest_gap(stream: Stream, killed_s: float) -> tuple[float, float]:
    """The longest gap that ends after the kill, as its begin and end."""
    gaps = [(begun, after) for begun, after in pairwise(stream.chunks_s) if after > killed_s]
    return max(gaps, key=lambda gap: gap[1] - gap[0])


async def _ready_pids(server: Server) -> dict[int, int | None]:
    """The process of each owner that is ready; None for one that is not."""
    workers = (await server.client.get_json("/workers"))["workers"]
    return {
        worker["index"]: worker["pid"] if worker["status"] == "ready" else None
        for worker in workers
    }


async def _healed(server: Server, *, gone: int) -> float:
    """Return when every owner is ready again, with a new process in place of ``gone``."""
    until = time.monotonic() + HEALED_TIMEOUT_S
    while time.monotonic() < until:
        pids = await _ready_pids(server)
        if None not in pids.values() and gone not in pids.values():
            return time.monotonic()
        await asyncio.sleep(0.05)
    raise RuntimeError(f"not all owners serve again after {HEALED_TIMEOUT_S:g} s")
