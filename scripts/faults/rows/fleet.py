"""Faults of several workers at once: a group's rank, rolling restart, no descriptors left."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from scripts.faults.service.client import Seen
from scripts.faults.service.process import ChaosService, ServiceError
from scripts.faults.service.system import LIMITS_OTHERS, open_files_limited
from scripts.faults.trials.stage import HANG_S, QUIET_S, Row, Stage, eventually
from scripts.faults.verdicts.leftovers import listening_port

GROUP: Final = 3
ROLLED: Final = 2
ROLLED_S: Final = 10.0
KILLED_S: Final = 0.1
RECOVERY_S: Final = 6.0
"""Since the loss of a rank: a stopped rank dies at the kill ladder's last rung, after 2 s."""
PROMPT_TOKENS_PER_S: Final = 100.0 / HANG_S
"""A worker that may be in a prompt is allowed the time to compute it, however slow it is."""
SPARE_FILES: Final = 6
SQUEEZE_S: Final = 0.3
AFTER_SQUEEZE_S: Final = 3.0
LIVE: Final = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def group_member(stage: Stage) -> None:
    """One rank is killed or stopped, busy or idle: the group restarts whole, all resume."""
    service = stage.service
    index = stage.rng.randrange(GROUP)
    # Cases alternate, so that a short run measures each of them.
    number = signal.SIGKILL if stage.result.trials % 2 else signal.SIGSTOP
    idle = stage.rng.random() < 0.5
    ranks = [rank for rank in range(GROUP) if not idle or rank != index]
    before = await _workers(service)
    async with _streams(stage, ranks) as streams:
        since = service.mark()
        harmed_s = time.monotonic()
        os.kill(service.pids[index], number)
        # The log may name another rank, the first one that reported the loss.
        lost = await service.wait_line(r"worker \d+: lost\b", since=since)
        _detected(stage, number, lost.time_s - harmed_s, streams)
        for rank in range(GROUP):
            await service.wait_ready(rank, since)
    resumed = [seen.resumed_s(harmed_s, lost.time_s) for seen in streams]
    stage.result.recovery_s += [time_s - lost.time_s for time_s in resumed if time_s is not None]
    after = await _workers(service)
    for name in ("epoch", "restarts"):
        grown = [now[name] - then[name] for now, then in zip(after, before, strict=True)]
        if grown != [1] * GROUP:
            stage.result.violate(f"{name} grew by {grown} in place of 1 for each rank")


@asynccontextmanager
async def _streams(stage: Stage, ranks: Sequence[int]) -> AsyncIterator[list[Seen]]:
    """One stream on each of these ranks and none elsewhere, started, and checked at the end."""
    asks = [replace(stage.oracle.draw(), rank=rank, by_openai=False) for rank in ranks]
    streams = [Seen(ask) for ask in asks]
    tasks = [asyncio.create_task(stage.service.client.stream(seen.ask, seen)) for seen in streams]
    try:
        if not await stage.load.wait_for(lambda: all(seen.chunks_s for seen in streams), QUIET_S):
            stage.result.violate(f"a stream never began: {[seen.error for seen in streams]}")
        if not any(seen.running for seen in streams):
            stage.result.violate("every stream was over before the fault")
        yield streams
    finally:
        await asyncio.gather(*tasks)
    for seen in streams:
        stage.result.take(seen, stage.oracle.expected(seen.ask))


def _detected(stage: Stage, number: signal.Signals, took_s: float, streams: Sequence[Seen]) -> None:
    """The two cases have separate bounds; the row's bound is that of a rank that exits."""
    if number is signal.SIGKILL:
        stage.result.detection_s.append(took_s)
        return
    prompts = sum(len(seen.ask.prompt) for seen in streams)
    allowed_s = stage.settings.slack * (HANG_S + prompts / PROMPT_TOKENS_PER_S + HANG_S)
    if took_s > allowed_s:
        stage.result.violate(f"a stopped rank was detected after {took_s:.2f} of {allowed_s:.2f} s")


async def rolling_restart(stage: Stage) -> None:
    """Replace every worker in turn, under load; no request fails."""
    service = stage.service
    await stage.load.wait_for(lambda: bool(stage.load.streaming(range(ROLLED))), QUIET_S)
    since, before = service.mark(), dict(service.pids)
    began_s = time.monotonic()
    if stage.rng.random() < 0.5:
        await _hang_up(service)
        for index in range(ROLLED):
            await service.wait_ready(index, since)
    else:
        for index in range(ROLLED):
            await _ask_for_restart(stage, index)
            await service.wait_ready(index, since)
    stage.result.recovery_s.append(time.monotonic() - began_s)
    if not await eventually(lambda: _settled(service), ROLLED_S):
        stage.result.violate(f"not all workers are ready: {await service.get('/server_info')}")
    if same := [index for index in range(ROLLED) if service.pids[index] == before[index]]:
        stage.result.violate(f"workers {same} were not replaced")
    if deaths := service.deaths(since):
        stage.result.violate(f"{deaths} workers were lost in a rolling restart")


async def _hang_up(service: ChaosService) -> None:
    """Request a restart of all workers; repeat until it is accepted."""

    async def taken() -> bool:
        since = service.mark()
        service.signal(signal.SIGHUP)
        answer = await service.wait_line("SIGHUP: ", since=since)
        return "restarting" in answer.text

    if not await eventually(taken):
        raise ServiceError(f"SIGHUP: refused for {QUIET_S:g} s")


async def _ask_for_restart(stage: Stage, index: int) -> None:
    """The previous restart may still be finishing; until then this one is refused."""

    async def taken() -> bool:
        answer = await stage.service.client.http.post(f"/workers/{index}/restart")
        if answer.status_code not in (202, 409):
            raise ServiceError(f"restart of {index}: {answer.status_code} {answer.text}")
        return answer.status_code == 202

    if not await eventually(taken):
        raise ServiceError(f"restart of {index}: refused for {QUIET_S:g} s")


async def _settled(service: ChaosService) -> bool:
    owners = (await service.get("/server_info"))["owners"]
    return all(owner["status"] == "ready" for owner in owners)


async def _workers(service: ChaosService) -> list[dict[str, int]]:
    workers = (await service.get("/workers"))["workers"]
    return [{name: worker[name] for name in ("epoch", "restarts")} for worker in workers]


async def no_descriptors(stage: Stage) -> None:
    """The controller has no descriptors left, and a worker dies: streams resume, it recovers."""
    service, load = stage.service, stage.load
    await load.wait_for(lambda: bool(load.streaming(stage.workers())), QUIET_S)
    index = stage.rng.choice(stage.workers())
    highest = service.footprint().fds + SPARE_FILES
    address = ("127.0.0.1", listening_port(service.pid))
    since = service.mark()
    clients: list[socket.socket] = []
    try:
        with open_files_limited(service.pid, highest):
            clients = [socket.create_connection(address) for _ in range(4 * SPARE_FILES)]
            for client in clients:
                client.sendall(LIVE)
            await asyncio.sleep(SQUEEZE_S)
            if all(map(_answered, clients)):
                stage.result.violate("there were descriptors for every connection")
            harmed_s = time.monotonic()
            os.kill(service.pids[index], signal.SIGKILL)
            lost = await service.wait_lost(index, since)
            stage.result.detection_s.append(lost.time_s - harmed_s)
            failed = rf"worker {index}: lost\b.*no process could be started"
            await service.wait_line(failed, since=since)
    finally:
        for client in clients:
            client.close()
    began_s = time.monotonic()
    await service.wait_ready(index, since)
    seen = await service.client.stream(stage.oracle.draw())
    stage.result.recovery_s.append(time.monotonic() - began_s)
    stage.result.take(seen, stage.oracle.expected(seen.ask))


def _answered(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1))
    except BlockingIOError:
        return False


FLEET_ROWS: Final = (
    Row(
        name="F24",
        title="a worker dies, no descriptors left",
        trial=no_descriptors,
        possible=LIMITS_OTHERS,
        bounds_s=(KILLED_S, AFTER_SQUEEZE_S),
    ),
    Row(
        name="F26",
        title="a rank of a group is killed or stopped",
        trial=group_member,
        arguments=("--enable-dp-attention", "--dp-size", f"{GROUP}", "--tp-size", f"{GROUP}"),
        lengths=(60, 120),
        load=False,
        bounds_s=(KILLED_S, RECOVERY_S),
    ),
    Row(
        name="F27",
        title="rolling restart under load",
        trial=rolling_restart,
        arguments=("--dp-size", f"{ROLLED}"),
        bounds_s=(float("inf"), ROLLED_S),
    ),
)
