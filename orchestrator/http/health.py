"""Is it alive, is it ready, does it answer: three questions, three routes."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, assert_never

import msgspec
from fastapi import Response

from mlx_dp.orchestrator.http.endpoint import Endpoint
from mlx_dp.orchestrator.service import (
    RETRY_ABSENT_S,
    Answer,
    Ended,
    Generation,
    Granted,
    NewTokens,
    OverloadedError,
    RefusedError,
    ServiceStatus,
    Started,
    WorkerStatus,
)
from mlx_dp.proto.messages import FinishReason
from mlx_dp.proto.sampling_params import SamplingParams

_DOWN: Final = (WorkerStatus.LOST, WorkerStatus.FAILED)


def _json(status: int, body: Mapping[str, Any]) -> Response:
    headers = {"retry-after": str(RETRY_ABSENT_S)} if status == 503 else None
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def live() -> Response:
    """The process turns its loop. A restart helps when this fails, and not otherwise."""
    return _json(200, {"status": "alive"})


def health(endpoint: Endpoint) -> Response:
    """200 only when new work is welcome. Answered from the books, so never behind a prefill.

    "degraded" is 200 too: some worker is lost or overdue, and another serves. "unresponsive" is
    not: all of them are overdue. "restarting" is not, though nothing is refused: what comes now
    waits for a model to load, and another instance that a balancer may have would serve it at once.
    """
    state = endpoint.service.state()
    ready = state.status is ServiceStatus.READY
    owners = {str(owner.owner): owner.status.value for owner in state.owners}
    degraded = ready and any(owner.status in _DOWN or owner.overdue for owner in state.owners)
    status = "degraded" if degraded else state.status.value
    serving = [owner for owner in state.owners if owner.status is WorkerStatus.READY]
    if ready and all(owner.overdue for owner in serving):
        reason = "no worker has made progress for longer than its step may take"
        return _json(503, {"status": "unresponsive", "owners": owners, "reason": reason})
    body: dict[str, Any] = {"status": status, "owners": owners}
    if not ready:
        messages = [owner.message for owner in state.owners if owner.message]
        body["reason"] = "; ".join([f"the service is {state.status.value}", *messages])
    return _json(200 if ready else 503, body)


async def health_generate(endpoint: Endpoint) -> Response:
    """200 only when every ready owner generated a token just now, each asked by its rank."""
    state = endpoint.service.state()
    ready = [owner.owner for owner in state.owners if owner.status is WorkerStatus.READY]
    results = dict(
        zip(ready, await asyncio.gather(*(_probe(endpoint, rank) for rank in ready)), strict=True)
    )
    failed = {rank: reason for rank, reason in results.items() if reason}
    if state.status is not ServiceStatus.READY:
        reason = f"the service is {state.status.value}"
    else:
        reason = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
    body = {
        "status": "unhealthy" if reason else "healthy",
        "ranks": [
            {
                "dp_rank": owner.owner,
                "status": owner.status.value,
                "ok": owner.owner in results and owner.owner not in failed,
                "reason": failed.get(owner.owner, ""),
            }
            for owner in state.owners
        ],
        "reason": reason,
    }
    return _json(503 if reason else 200, body)


async def _probe(endpoint: Endpoint, rank: int) -> str:
    """Say why the owner is not healthy, or nothing.

    A busy owner may not get to the probe in time: then tokens of other requests count.
    """
    before = _progress(endpoint, rank)
    prompt = endpoint.text.encode("Hi", add_special_tokens=True)[:1] or (0,)
    generation = Generation(
        prompt_ids=prompt,
        max_tokens=1,
        stop_token_ids=(),
        params=SamplingParams(temperature=0.0),
        routed_dp_rank=rank,
        label="health_generate",
    )
    timeout_s = endpoint.options.probe_timeout_s
    try:
        answer = endpoint.service.submit(generation)
    except (OverloadedError, RefusedError) as error:
        return str(error)
    try:
        async with asyncio.timeout(timeout_s):
            return await _first_token(answer)
    except TimeoutError:
        if _progress(endpoint, rank) > before:
            return ""
        return f"no token within {timeout_s:g} s"
    finally:
        answer.cancel()


async def _first_token(answer: Answer) -> str:
    async for event in answer:
        match event:
            case NewTokens() | Ended(reason=FinishReason.STOP | FinishReason.LENGTH):
                answer.complete()
                return ""
            case Granted() | Started():
                continue
            case Ended():
                return event.message or event.code or event.reason.value
            case _:
                assert_never(event)
    raise AssertionError(f"answer {answer.request_id} has no end")


def _progress(endpoint: Endpoint, rank: int) -> int:
    owners = endpoint.service.state().owners
    return sum(owner.generated_tokens_total for owner in owners if owner.owner == rank)
