"""Faults on the wire, of a group, and of an operator who restarts workers one by one."""

import os
import signal
import time
from typing import Final

import zmq
from chaos_nonsense import malformed_frames
from chaos_service import ServiceError
from chaos_stage import HANG_SEEN_S, QUIET_S, Row, Stage, eventually

LARGEST_FRAME: Final = 64 * 2**20
LARGEST_SHARE: Final = 0.1
ALLOWED_GROWTH: Final = 50 * 2**20
GROUP: Final = 4
ROLLED_S: Final = 60.0


async def foreign_frames(stage: Stage) -> None:
    """Garbage and forgeries on the workers' socket, and a stranger that never reads."""
    service = stage.service
    await stage.load.wait_for(lambda: bool(stage.load.streaming(stage.workers())), QUIET_S)
    since, before = service.mark(), service.footprint()
    context = zmq.Context()
    try:
        names = ["stranger", "w0-0000000000000000", service.identity(0)]
        strangers = [_stranger(context, service.endpoint(), name.encode()) for name in names]
        for stranger in strangers:
            largest = LARGEST_FRAME if stage.rng.random() < LARGEST_SHARE else 0
            for frames in malformed_frames(stage.rng, largest):
                stranger.send_multipart(frames, zmq.DONTWAIT)
        streams = [seen for seen in stage.load.seen.values() if not seen.ended_s]
        await stage.load.wait_for(lambda: all(seen.ended_s for seen in streams), QUIET_S)
    finally:
        context.destroy(linger=0)
    if deaths := service.deaths(since):
        stage.result.violate(f"{deaths} workers were given up for what a stranger sent")
    if (grown := service.footprint().rss_nbytes - before.rss_nbytes) > ALLOWED_GROWTH:
        stage.result.violate(f"memory grew by {grown / 2**20:.0f} MiB")


def _stranger(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, identity: bytes
) -> "zmq.Socket[bytes]":
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, identity)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(endpoint)
    return stranger


async def group_member(stage: Stage) -> None:
    """One rank is killed or stopped: the group comes back as one, and all requests go on."""
    service, load = stage.service, stage.load
    await load.wait_for(lambda: bool(load.streaming(range(GROUP))), QUIET_S)
    index = stage.rng.randrange(GROUP)
    number = stage.rng.choice((signal.SIGKILL, signal.SIGSTOP))
    streams = load.streaming(range(GROUP))
    since = service.mark()
    load.refusals_allowed = True
    harmed_s = time.monotonic()
    os.kill(service.pids[index], number)
    # The rank that is named may be another one, when it was the first that told of the end.
    lost = await service.wait_line(r"worker \d+: lost\b", since=since)
    stage.result.detection_s.append(lost.time_s - harmed_s)
    for rank in range(GROUP):
        await service.wait_ready(rank, since)
    await load.wait_for(lambda: all(seen.ended_s for seen in streams), QUIET_S)
    resumed = [seen.resumed_s(harmed_s, lost.time_s) for seen in streams]
    stage.result.recovery_s += [time_s - harmed_s for time_s in resumed if time_s is not None]
    load.refusals_allowed = False


async def rolling_restart(stage: Stage) -> None:
    """Every worker is replaced in turn, under load, and no request fails."""
    service = stage.service
    for index in stage.workers():
        since = service.mark()
        began_s = time.monotonic()
        await _ask_for_restart(stage, index)
        await service.wait_ready(index, since)
        stage.result.recovery_s.append(time.monotonic() - began_s)

        async def settled() -> bool:
            owners = (await service.get("/server_info"))["owners"]
            return all(owner["status"] == "ready" for owner in owners)

        if not await eventually(settled, ROLLED_S):
            stage.result.violate(f"not all workers are ready after the restart of {index}")


async def _ask_for_restart(stage: Stage, index: int) -> None:
    """The one before may have a moment to go, for which it is refused."""

    async def taken() -> bool:
        answer = await stage.service.client.http.post(f"/workers/{index}/restart")
        if answer.status_code not in (202, 409):
            raise ServiceError(f"restart of {index}: {answer.status_code} {answer.text}")
        return answer.status_code == 202

    if not await eventually(taken):
        raise ServiceError(f"restart of {index}: refused for {QUIET_S:g} s")


WIRE_ROWS: Final = (
    Row(name="F18", title="malformed, forged, oversized frames", trial=foreign_frames),
    Row(
        name="F26",
        title="a rank of a group is killed or stopped",
        trial=group_member,
        arguments=("--enable-dp-attention", "--dp-size", str(GROUP), "--tp-size", str(GROUP)),
        bounds_s=(HANG_SEEN_S, float("inf")),
    ),
    Row(name="F27", title="rolling restart under load", trial=rolling_restart),
)
