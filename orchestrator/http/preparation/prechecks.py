"""Prechecks: refuse overload and impossible requests before any work is done for them. Pure."""

import re
from collections.abc import Callable, Sequence
from typing import Final

from mlx_dp.orchestrator.api import (
    RETRY_ABSENT_S,
    ServiceState,
    ServiceStatus,
    WorkerStatus,
    queue_full_message,
)
from mlx_dp.orchestrator.formats.common.errors import ApiError, invalid, overloaded
from mlx_dp.orchestrator.formats.common.generation_request import RequestedRank
from mlx_dp.orchestrator.http.stream.queue_pace import QueueLoad, queue_load, request_slots
from mlx_dp.orchestrator.options import HttpOptions

RANK_HEADER: Final = "x-data-parallel-rank"

_TAKING: Final = (ServiceStatus.READY, ServiceStatus.RESTARTING)
_RANK: Final = re.compile(r"[0-9]{1,7}")


def refuse_overload(
    state: ServiceState,
    *,
    preparing: int,
    retry_after_s: Callable[[QueueLoad], int],
    choices: int = 1,
    param: str = "n",
) -> None:
    """Raise ApiError when the request certainly cannot be queued now.

    ``preparing`` requests passed this check and are not queued yet: without counting them, a flood
    would be tokenized before it is refused. ``param`` is the field that asks for ``choices``.
    ``retry_after_s`` is called only for a refusal.
    """
    if state.status not in _TAKING:
        raise overloaded(503, f"the service is {state.status.value}", retry_after_s=RETRY_ABSENT_S)
    room = max(1, state.max_queued_requests)
    slots = request_slots(state, free=False)
    # During a restart no owner is there to say how many slots there will be.
    if choices > slots + room and state.status is ServiceStatus.READY:
        raise invalid(
            param,
            f"the request asks for {choices} answers, but {slots} can run at once and {room} wait",
        )
    # Slots that are free while requests queue do not help: those requests wait for tokens.
    free = 0 if state.queued_requests else request_slots(state, free=True)
    if state.queued_requests + max(0, preparing + choices - free) > room:
        raise overloaded(
            429,
            _full_queue(state.queued_requests, room, preparing, free, choices),
            retry_after_s=retry_after_s(queue_load(state, preparing)),
        )


def _full_queue(queued: int, room: int, preparing: int, free: int, choices: int) -> str:
    message = f"{queue_full_message(queued, room)}, {preparing} being prepared"
    if free:
        message += f" for {free} free slot{'' if free == 1 else 's'}"
    return message if choices == 1 else f"{message}, and this request asks for {choices} answers"


def requested_rank(
    headers: Sequence[str], ranks: Sequence[RequestedRank], num_owners: int
) -> int | None:
    """Return the rank that the client asks for. Raises ApiError unless it exists.

    ``headers``: all values of ``RANK_HEADER``. The last one counts, since a router that forwards
    its client's headers appends its own; and headers override the body, which a router leaves
    alone when it sets a header. ``ranks``: the fields of the body that name one.
    """
    given = [value.strip() for header in headers for value in header.split(",")]
    if headers:
        name = "X-Data-Parallel-Rank"
        if not _RANK.fullmatch(given[-1]):
            raise invalid(
                name, f"it should be a rank from 0 to {num_owners - 1}, got {ascii(given[-1])[:40]}"
            )
        rank = int(given[-1])
    elif ranks:
        name, rank = _rank_of_body(ranks)
    else:
        return None
    if rank >= num_owners:
        raise invalid(name, f"{rank} is out of range, ranks are 0 to {num_owners - 1}")
    return rank


def _rank_of_body(ranks: Sequence[RequestedRank]) -> tuple[str, int]:
    """Return the field and the rank. Raises ApiError when two fields differ.

    Members of an object have no order, so the router's cannot be told from its client's.
    """
    first, *others = ranks
    for other in others:
        if other.rank != first.rank:
            raise invalid(
                first.param,
                f"it is {first.rank} and {other.param} is {other.rank}: give one of them, or both "
                "alike",
            )
    return first.param, first.rank


def refuse_unready_rank(state: ServiceState, rank: int | None) -> None:
    """Raise ApiError unless the owner of an explicit rank is ready: the request may not move.

    An owner that is being restarted on request counts as ready.
    """
    if rank is None:
        return
    for owner in state.owners:
        ready = owner.status is WorkerStatus.READY or owner.restarting
        if owner.dp_rank == rank and not ready:
            raise overloaded(
                503,
                f"data-parallel rank {rank} is {owner.status.value}",
                retry_after_s=RETRY_ABSENT_S,
            )


def refuse_model(model: str | None, options: HttpOptions) -> None:
    """Raise ApiError when the client asks for a model that is not served."""
    if model and model not in options.served_model_names and model not in options.own_model_names:
        raise unknown_model(model, options)


def unknown_model(model: str, options: HttpOptions) -> ApiError:
    served = ", ".join(map(ascii, options.served_model_names))
    return ApiError(
        404,
        f"the model {ascii(model)[:200]} does not exist, this server has {served}",
        param="model",
        code="model_not_found",
    )


def vocab_size(state: ServiceState, default: int) -> int:
    """Count the model's token ids: the length of its table, once an owner has loaded it."""
    sizes = [owner.shape.vocab_size for owner in state.owners if owner.shape is not None]
    return min(sizes, default=default)
