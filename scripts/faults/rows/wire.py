"""Faults on the workers' socket: strangers, forgeries, and a worker that sends garbage."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from scripts.faults.service.forgeries import forgeries, garbage
from scripts.faults.service.process import ChaosService
from scripts.faults.trials.loss import victim
from scripts.faults.trials.stage import QUIET_S, Row, Stage, eventually

LARGEST_FRAME: Final = 64 * 2**20
LARGEST_SHARE: Final = 0.1
GARBLED_SHARE: Final = 0.4
ALLOWED_GROWTH: Final = 50 * 2**20
DETECTION_S: Final = 0.2
"""A worker reads the order within a few steps, and garbles its next message."""
RECOVERY_S: Final = 1.0
UNKNOWN: Final = "unknown_frames_total"
MALFORMED: Final = "malformed_frames_total"

Stranger = zmq.Socket[bytes]


async def foreign_frames(stage: Stage) -> None:
    """Frames of unknown peers are dropped; a worker that sends a malformed one is replaced."""
    service = stage.service
    await stage.load.wait_for(lambda: bool(stage.load.streaming(stage.workers())), QUIET_S)
    since, before = service.mark(), service.footprint()
    await _strangers_speak(stage)
    if deaths := service.deaths(since):
        stage.result.violate(f"{deaths} workers were lost for frames of a stranger")
    if (grown := service.footprint().rss_nbytes - before.rss_nbytes) > ALLOWED_GROWTH:
        stage.result.violate(f"memory grew by {grown / 2**20:.0f} MiB")
    # In the first trial too, so that forgeries can name a past incarnation.
    if stage.result.trials == 1 or stage.rng.random() < GARBLED_SHARE:
        await _garbles(stage)


async def _strangers_speak(stage: Stage) -> None:
    """Send the frames, and wait until the controller has counted all of them."""
    service = stage.service
    counters = await service.counters()
    last = counters["requests_started_total"]
    requests = range(max(1, last + 1 - stage.settings.streams), last + 1)
    names = ["stranger", "w0-0000000000000000", *_gone(service)[-1:]]
    with _connected(service.endpoint(), names) as strangers:
        sent = 0
        for stranger in strangers:
            for frames in (*garbage(stage.rng), *forgeries(requests)):
                stranger.send_multipart(frames, zmq.DONTWAIT)
                sent += 1

        async def counted() -> bool:
            return (await service.counters())[UNKNOWN] - counters[UNKNOWN] >= sent

        if not await eventually(counted):
            found = (await service.counters())[UNKNOWN] - counters[UNKNOWN]
            stage.result.violate(f"of {sent} frames from strangers {found} were counted")
        if stage.rng.random() < LARGEST_SHARE:
            await _oversized(stage, strangers[0])
        await _impostor(stage)
        streams = [seen for seen in stage.load.seen.values() if not seen.ended_s]
        await stage.load.wait_for(lambda: all(seen.ended_s for seen in streams), QUIET_S)


async def _oversized(stage: Stage, stranger: Stranger) -> None:
    """A frame over the limit costs its sender the connection."""
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    async def cut_off() -> bool:
        return bool(monitor.poll(0)) and bool(recv_monitor_message(monitor))

    stranger.send(bytes(LARGEST_FRAME), zmq.DONTWAIT)
    if not await eventually(cut_off):
        stage.result.violate(f"a frame of {LARGEST_FRAME} bytes was read")
    stranger.disable_monitor()


async def _impostor(stage: Stage) -> None:
    """Frames under the identity of a connected worker are ignored and not counted."""
    service = stage.service
    before = await service.counters()
    with _connected(service.endpoint(), [service.identity(0)]) as (impostor,):
        for frames in garbage(stage.rng):
            impostor.send_multipart(frames, zmq.DONTWAIT)
        await service.running()
    if (await service.counters())[MALFORMED] != before[MALFORMED]:
        stage.result.violate("a frame under a connected worker's identity was processed")


async def _garbles(stage: Stage) -> None:
    """A worker sends one malformed frame: it is replaced once, and its streams resume."""
    service, load = stage.service, stage.load
    before = await service.counters()
    index = await victim(stage)
    streams = load.streaming((index,))
    since = service.mark()
    harmed_s = time.monotonic()
    service.order(index, "garble")
    lost = await service.wait_line(rf"worker {index}: lost\b.*malformed message", since=since)
    stage.result.detection_s.append(lost.time_s - harmed_s)
    await service.wait_ready(index, since)
    await load.wait_for(lambda: all(seen.ended_s for seen in streams), QUIET_S)
    resumed = [seen.resumed_s(harmed_s, lost.time_s) for seen in streams]
    stage.result.recovery_s += [time_s - harmed_s for time_s in resumed if time_s is not None]
    after = await service.counters()
    grown = [after[name] - before[name] for name in (MALFORMED, "worker_deaths_total")]
    if grown != [1, 1] or service.deaths(since) != 1:
        stage.result.violate(f"one bad frame: {grown} malformed frames and deaths")


def _gone(service: ChaosService) -> list[str]:
    """The identities of workers that were lost."""
    lost = re.compile(r"worker (\d+): lost,.* incarnation (\w+)")
    found = (lost.search(line.text) for line in service.lines)
    return [f"w{each[1]}-{each[2]}" for each in found if each is not None]


@contextmanager
def _connected(endpoint: str, names: Sequence[str]) -> Iterator[list[Stranger]]:
    """Strangers under these identities, none of which ever reads."""
    context = zmq.Context()
    try:
        strangers = []
        for name in names:
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.IDENTITY, name.encode())
            stranger.connect(endpoint)
            strangers.append(stranger)
        yield strangers
    finally:
        context.destroy(linger=0)


WIRE_ROW: Final = Row(
    name="F18",
    title="malformed, forged, oversized frames",
    trial=foreign_frames,
    bounds_s=(DETECTION_S, RECOVERY_S),
)
