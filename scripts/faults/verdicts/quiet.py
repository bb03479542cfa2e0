"""Checks of an idle service: only its workers and their sockets, nothing of ended requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import psutil

from scripts.faults.service.process import ChaosService, Footprint, is_worker
from scripts.faults.verdicts.verdict import RowResult

QUIET_S: Final = 10.0
OUTCOMES: Final = ("ok", "error", "aborted")
SPARE_FDS: Final = 4
"""File descriptors that the controller may hold beyond those before the row."""


async def look_at_rest(service: ChaosService, result: RowResult, before: Footprint) -> None:
    """Count resources that are held without a request: slots, descriptors, processes."""
    if not await eventually(lambda: _at_rest(service)):
        result.leave("requests", await service.running())
    counters = await service.counters()
    ended = sum(counters[f'requests_total{{outcome="{word}"}}'] for word in OUTCOMES)
    if counters["requests_started_total"] != ended:
        result.violate(f"{counters['requests_started_total']} started, {ended} ended")
    held = [load["num_reserved_tokens"] for load in (await service.get("/v1/loads"))["loads"]]
    result.leave("tokens", sum(held), f"reserved: {held}")
    after = service.footprint()
    result.leave("fds", after.fds - before.fds - SPARE_FDS, f"{before} {after}")
    if not await eventually(lambda: _only_workers(service)):
        workers, zombies = _children(service)
        ghosts = (workers | set(service.alive())) - set(service.pids.values())
        result.leave("processes", len(ghosts), f"beside the workers: {sorted(ghosts)}")
        result.leave("zombies", len(zombies), sorted(zombies))
        if missing := set(service.pids.values()) - workers:
            result.violate(f"workers are no children of their controller: {sorted(missing)}")


async def look_after_end(
    service: ChaosService, result: RowResult, *, within_s: float = 2.0
) -> None:
    """Count the workers of a service that is gone, and its sockets."""

    async def gone() -> bool:
        return not service.alive()

    await eventually(gone, within_s)
    result.leave("processes", len(service.alive()), service.alive())
    left = [path for path in service.sockets if path.exists()]
    result.leave("files", len(left), left)


async def _at_rest(service: ChaosService) -> bool:
    return await service.running() == 0


async def _only_workers(service: ChaosService) -> bool:
    """Whether the present workers, and no other processes, are its children."""
    workers, zombies = _children(service)
    present = set(service.pids.values())
    return workers == present == set(service.alive()) and not zombies


def _children(service: ChaosService) -> tuple[set[int], set[int]]:
    """The living workers among the controller's descendants, and the unreaped dead."""
    workers, zombies = set(), set()
    for child in psutil.Process(service.pid).children(recursive=True):
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                zombies.add(child.pid)
        except psutil.NoSuchProcess:
            continue
        if is_worker(child.pid):
            workers.add(child.pid)
    return workers, zombies


async def eventually(
    holds: Callable[[], Awaitable[bool]], timeout_s: float = QUIET_S, pause_s: float = 0.02
) -> bool:
    """Poll a state that sends no event; False on time-out."""
    ends_s = time.monotonic() + timeout_s
    while not await holds():
        if time.monotonic() > ends_s:
            return False
        await asyncio.sleep(pause_s)
    return True
