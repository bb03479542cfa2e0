"""Scenarios: throughput, a long prompt beside running streams, a client that disconnects."""

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from scripts.benchmarks.results.report import quantile
from scripts.benchmarks.serving.client import Request, Stream, run_clients
from scripts.benchmarks.serving.server import MemoryPeak, Server

RUNNING_STREAMS = 4
WARM_CHUNKS = 8
"""Chunks that every stream must have before the scenario acts."""
POLL_S = 0.002
LEAVE_TIMEOUT_S = 60.0

Measures = dict[str, Any]


async def throughput(server: Server, requests: Sequence[Request], concurrency: int) -> Measures:
    """Run the requests, and return the rate and the evenness of the tokens."""
    with MemoryPeak(server) as memory:
        begun = time.monotonic()
        streams = await run_clients(server.client, requests, concurrency)
        wall_s = time.monotonic() - begun
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    ttfts = [stream.ttft_s for stream in streams]
    tokens = sum(stream.completion_tokens for stream in streams)
    return {
        "wall_s": wall_s,
        "completion_tokens": tokens,
        "prompt_tokens": sum(stream.prompt_tokens for stream in streams),
        "tokens_per_s": tokens / wall_s,
        "ttft_p50_s": quantile(ttfts, 0.5),
        "ttft_p99_s": quantile(ttfts, 0.99),
        "gap_p50_s": quantile(gaps, 0.5),
        "gap_p99_s": quantile(gaps, 0.99),
        "gap_max_s": quantile(gaps, 1.0),
        "peak_rss_nbytes": memory.nbytes,
        "texts": [stream.text for stream in streams],
    }


async def long_prompt(server: Server, running: Sequence[Request], arriving: Request) -> Measures:
    """Send a long prompt while streams run, and measure their gaps until its first token."""
    seen = [Stream() for _ in running]
    late = Stream()
    tasks = [
        asyncio.create_task(server.client.stream(request, stream))
        for request, stream in zip(running, seen, strict=True)
    ]
    try:
        await all_have(seen, WARM_CHUNKS, tasks)
        await server.client.stream(arriving, late)
        first_token_s = late.first_s
        # The gap of a stalled stream ends only with the token that follows.
        await _all_have_after(seen, first_token_s, tasks)
    finally:
        await cancel_all(tasks)
    gaps = [
        after - before
        for stream in seen
        for before, after in pairwise(stream.chunks_s)
        if after > late.sent_s and before < first_token_s
    ]
    return {
        "prompt_tokens": late.prompt_tokens,
        "ttft_s": late.ttft_s,
        "gaps": len(gaps),
        "gap_p50_s": quantile(gaps, 0.5),
        "gap_p99_s": quantile(gaps, 0.99),
        "gap_max_s": quantile(gaps, 1.0),
    }


async def client_leaves(server: Server, running: Sequence[Request]) -> Measures:
    """Close one of several streams, and measure how long ``/v1/loads`` still counts it."""
    seen = [Stream() for _ in running]
    tasks = [
        asyncio.create_task(server.client.stream(request, stream))
        for request, stream in zip(running, seen, strict=True)
    ]
    try:
        await all_have(seen, WARM_CHUNKS, tasks)
        before = await running_requests(server)
        step_s = quantile(seen[0].gaps_s, 0.5)
        tasks[0].cancel()
        left_s = time.monotonic()
        while await running_requests(server) >= before:
            if time.monotonic() - left_s > LEAVE_TIMEOUT_S:
                return {"freed_after_s": float("inf"), "freed_after_steps": float("inf")}
            await asyncio.sleep(POLL_S)
        freed_s = time.monotonic() - left_s
    finally:
        await cancel_all(tasks)
    return {"freed_after_s": freed_s, "freed_after_steps": freed_s / step_s, "step_s": step_s}


async def running_requests(server: Server) -> int:
    """Requests that hold a slot, over all owners."""
    loads = await server.client.get_json("/v1/loads")
    return sum(load["num_running_reqs"] for load in loads["loads"])


async def all_have(
    streams: Sequence[Stream], chunks: int, tasks: Sequence[asyncio.Task[Stream]]
) -> None:
    """Return once each stream has this many chunks. Raises RuntimeError when one ends before."""
    while any(len(stream.chunks_s) < chunks for stream in streams):
        _require_running(tasks)
        await asyncio.sleep(POLL_S)


async def _all_have_after(
    streams: Sequence[Stream], moment_s: float, tasks: Sequence[asyncio.Task[Stream]]
) -> None:
    while any(stream.chunks_s[-1] <= moment_s for stream in streams):
        _require_running(tasks)
        await asyncio.sleep(POLL_S)


def _require_running(tasks: Sequence[asyncio.Task[Stream]]) -> None:
    for task in tasks:
        if task.done():
            raise RuntimeError(f"a stream ended too early to measure it: {task.result()}")


async def cancel_all(tasks: Sequence[asyncio.Task[Stream]]) -> None:
    """Disconnect all clients."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
