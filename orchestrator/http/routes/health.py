"""GET /live, /health and /health_generate: alive, ready, and able to generate."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, assert_never

import msgspec
from fastapi import Response

from mlx_dp.orchestrator.api import (
    RETRY_ABSENT_S,
    Ended,
    Generation,
    Granted,
    NewTokens,
    OverloadedError,
    OwnerState,
    RefusedError,
    ResponseStream,
    ServiceStatus,
    Started,
    WorkerStatus,
)
from mlx_dp.orchestrator.formats.common.errors import invalid, shown
from mlx_dp.orchestrator.http.routes.context import AppContext
from mlx_dp.proto.messages.events import FinishReason
from mlx_dp.proto.messages.sampling_params import SamplingParams

# The interval between looks for a token of an owner while the queue is full.
_POLL_S: Final = 0.05
_DOWN: Final = (WorkerStatus.LOST, WorkerStatus.FAILED)


def _json(status: int, body: Mapping[str, Any]) -> Response:
    headers = {"retry-after": str(RETRY_ABSENT_S)} if status == 503 else None
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def live() -> Response:
    """200 while the event loop runs. A restart helps only if this fails."""
    return _json(200, {"status": "alive"})


def health(context: AppContext) -> Response:
    """200 only when new requests run at once. Made from known state, so never behind a prefill.

    "degraded" is 200 too: a worker is lost, reloading or overdue, and another one serves.
    "unresponsive" is 503: all workers are overdue. "restarting" is 503 although nothing is refused:
    a new request would wait for a model to load, while another instance behind the balancer could
    serve it at once.
    """
    state = context.service.state()
    ready = state.status is ServiceStatus.READY
    owners = {str(owner.dp_rank): owner.status.value for owner in state.owners}
    degraded = ready and any(_is_gone(owner) or owner.overdue for owner in state.owners)
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


def _is_gone(owner: OwnerState) -> bool:
    """Whether the owner served before and does not now. One that first loads never served."""
    loads_again = owner.status is WorkerStatus.STARTING and bool(owner.message)
    return owner.status in _DOWN or loads_again


@dataclass(frozen=True, slots=True)
class _Probed:
    """One owner and why it gave no token. An empty reason means that it gave one."""

    owner: OwnerState
    reason: str

    @property
    def ok(self) -> bool:
        return not self.reason

    @property
    def missing(self) -> bool:
        """Whether the owner's capacity is lost."""
        return not self.ok and (_is_gone(self.owner) or self.owner.status is WorkerStatus.READY)


async def health_generate(context: AppContext, dp_rank: str | None) -> Response:
    """200 while at least one ready owner generates a token. Each is probed by its rank.

    "degraded", as in ``health``: other owners give no token. With ``dp_rank`` only that owner is
    probed. Raises ApiError for a rank that does not exist.
    """
    state = context.service.state()
    owners = state.owners
    if dp_rank is not None:
        rank = _existing_rank(dp_rank, len(owners))
        owners = tuple(owner for owner in owners if owner.dp_rank == rank)
    probed = await asyncio.gather(*(_probed(context, state.status, owner) for owner in owners))
    if not any(each.ok for each in probed):
        status = "unhealthy"
    elif any(each.missing for each in probed):
        status = "degraded"
    else:
        status = "healthy"
    body = {
        "status": status,
        "ranks": [
            {
                "dp_rank": each.owner.dp_rank,
                "status": each.owner.status.value,
                "ok": each.ok,
                "reason": each.reason,
            }
            for each in probed
        ],
        "reason": _summary(state.status, probed) if status != "healthy" else "",
    }
    return _json(503 if status == "unhealthy" else 200, body)


def _existing_rank(text: str, num_owners: int) -> int:
    """Raises ApiError."""
    if text.isascii() and text.isdigit() and len(text) < 8 and int(text) < num_owners:
        return int(text)
    raise invalid("dp_rank", f"use a rank from 0 to {num_owners - 1}, got {shown(text)}")


def _summary(status: ServiceStatus, probed: Iterable[_Probed]) -> str:
    if status is not ServiceStatus.READY:
        return f"the service is {status.value}"
    return "; ".join(f"rank {each.owner.dp_rank}: {each.reason}" for each in probed if not each.ok)


async def _probed(context: AppContext, status: ServiceStatus, owner: OwnerState) -> _Probed:
    """Probe one owner, unless its state already says that it cannot stream."""
    if status is not ServiceStatus.READY:
        return _Probed(owner, f"the service is {status.value}")
    if owner.status is not WorkerStatus.READY:
        detail = f" ({owner.message})" if owner.message else ""
        return _Probed(owner, f"the owner is {owner.status.value}{detail}")
    return _Probed(owner, await _probe(context, owner.dp_rank))


async def _probe(context: AppContext, rank: int) -> str:
    """Return why the owner is not healthy, or an empty string.

    A busy owner may not reach the probe in time, and a full queue refuses it: then tokens of other
    requests count.
    """
    before = _progress(context, rank)
    prompt = context.text.encode("Hi", add_special_tokens=True)[:1] or (0,)
    generation = Generation(
        prompt_ids=prompt,
        max_tokens=1,
        stop_token_ids=(),
        params=SamplingParams(temperature=0.0),
        routed_dp_rank=rank,
        label="health_generate",
    )
    timeout_s = context.options.probe_timeout_s
    try:
        stream = context.service.submit(generation)
    except OverloadedError as error:
        if error.status == 429:
            return await _wait_for_progress(context, rank, before)
        return str(error)
    except RefusedError as error:
        return str(error)
    try:
        async with asyncio.timeout(timeout_s):
            return await _first_token(stream)
    except TimeoutError:
        if _progress(context, rank) > before:
            return ""
        return f"no token within {timeout_s:g} s"
    finally:
        stream.cancel()


async def _first_token(stream: ResponseStream) -> str:
    async for event in stream:
        match event:
            case NewTokens() | Ended(reason=FinishReason.STOP | FinishReason.LENGTH):
                stream.complete()
                return ""
            case Granted() | Started():
                continue
            case Ended():
                return event.message or event.code or event.reason.value
            case _:
                assert_never(event)
    raise AssertionError(f"response stream {stream.request_id} has no end")


async def _wait_for_progress(context: AppContext, rank: int, before: int) -> str:
    """Return why the owner is not healthy, judged by tokens of other requests alone."""
    timeout_s = context.options.probe_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            while _progress(context, rank) == before:
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return f"no token within {timeout_s:g} s, and the queue is full"
    return ""


def _progress(context: AppContext, rank: int) -> int:
    owners = context.service.state().owners
    return sum(owner.generated_tokens_total for owner in owners if owner.dp_rank == rank)
