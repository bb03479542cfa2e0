"""Clients that send malformed or oversized requests."""

import asyncio
import time
from typing import Final

from scripts.benchmarks.results.report import milliseconds, quantile
from scripts.faults.service.client import MODEL, Seen
from scripts.faults.service.nonsense import broken_framing, malformed_requests
from scripts.faults.service.process import ChaosService
from scripts.faults.service.raw_client import address
from scripts.faults.trials.stage import QUIET_S, Row, Stage

REFUSED_S: Final = 1.0
UNBLOCKED_S: Final = 0.1
NO_ANSWER: Final = 0
MUCH_TEXT: Final = 10 * 2**20


async def nonsense(stage: Stage) -> None:
    """Malformed HTTP, JSON and fields: 4xx or a closed connection, and a quiet log."""
    service = stage.service
    since = service.mark()
    began = (await service.counters())["requests_started_total"]
    for name, data in malformed_requests(stage.rng):
        status = await _status(service, data)
        if status is None or not 400 <= status < 500:
            stage.result.violate(f"{name}: status {status}")
    for name, data in broken_framing(stage.rng):
        status = await _status(service, data)
        if status is not None and not 400 <= status < 500:
            stage.result.violate(f"{name}: status {status}")
    if (await service.counters())["requests_started_total"] != began:
        stage.result.violate("nonsense reached the queue")
    if deaths := service.deaths(since):
        stage.result.violate(f"{deaths} workers died")
    logged = sum(len(line.text) for line in service.lines[since:])
    if logged > 20_000:
        stage.result.violate(f"{logged} bytes of log for it")


async def _status(service: ChaosService, data: bytes) -> int | None:
    """The response's status, None when the connection is closed without one, or NO_ANSWER."""
    reader, writer = await asyncio.open_connection(*address(service))
    try:
        async with asyncio.timeout(QUIET_S):
            writer.write(data)
            line = await reader.readline()
    except TimeoutError:
        return NO_ANSWER
    except OSError:
        return None
    finally:
        writer.transport.abort()
    return int(line.split()[1]) if line else None


async def overlong(stage: Stage) -> None:
    """A prompt beyond the context is refused in a second, and others are not delayed."""
    context = (await stage.service.get("/v1/models"))["data"][0]["max_model_len"]
    for prompt in ([1] * (context + 1), "x" * MUCH_TEXT):
        await stage.load.wait_for(lambda: len(_streaming(stage)) >= stage.settings.workers, QUIET_S)
        others = _streaming(stage)
        if not others:
            stage.result.violate("there was no stream that could have been delayed")
        began_s = time.monotonic()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        answer = await stage.service.client.http.post("/v1/completions", json=body)
        ended_s = time.monotonic()
        stage.result.detection_s.append(ended_s - began_s)
        gap_s = quantile([_gap_s(seen, began_s, ended_s) for seen in others] or [0.0], 0.99)
        if gap_s > (allowed_s := UNBLOCKED_S * stage.settings.slack):
            stage.result.violate(
                f"other streams waited {milliseconds(gap_s)}, allowed {milliseconds(allowed_s)}"
            )
        if answer.status_code not in (400, 413):
            stage.result.violate(f"{len(prompt)} of a prompt: status {answer.status_code}")


def _streaming(stage: Stage) -> list[Seen]:
    return [seen for seen in stage.load.seen.values() if seen.running]


def _gap_s(seen: Seen, began_s: float, ended_s: float) -> float:
    """The longest wait for a token between two times, including one that has not ended."""
    pending_s = 0.0 if seen.ended_s else ended_s - seen.chunks_s[-1]
    return max(pending_s, seen.longest_gap_s(began_s, ended_s))


NONSENSE_ROWS: Final = (
    Row(name="F17", title="malformed HTTP and JSON", trial=nonsense, load=False),
    Row(
        name="F20",
        title="prompt of context + 1, prompt of 10 MiB",
        trial=overlong,
        bounds_s=(REFUSED_S, float("inf")),
    ),
)
