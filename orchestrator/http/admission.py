"""What is decided before any work is done for a request. Pure: states in, errors out."""

import re
from collections.abc import Callable, Sequence
from typing import Final

from mlx_dp.orchestrator.http.queue_pace import QueueLoad
from mlx_dp.orchestrator.openai.errors import ApiError, invalid, overloaded
from mlx_dp.orchestrator.openai.fields import GenerationFields
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.service import (
    RETRY_ABSENT_S,
    ServiceState,
    ServiceStatus,
    WorkerStatus,
    queue_full,
)

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
    """Raise ApiError when it is certain that the request cannot be queued now.

    ``preparing`` requests passed this check and are not queued yet: without counting them, a flood
    would be tokenized before it is refused. ``param`` is what asks for so many ``choices``.
    ``retry_after_s`` is asked only about a refusal.
    """
    if state.status not in _TAKING:
        raise overloaded(503, f"the service is {state.status.value}", retry_after_s=RETRY_ABSENT_S)
    room = max(1, state.max_queued_requests)
    slots = _slots(state, free=False)
    # In a restart nobody is there to tell how many there will be.
    if choices > slots + room and state.status is ServiceStatus.READY:
        raise invalid(
            param,
            f"the request asks for {choices} answers, but {slots} can run at once and {room} wait",
        )
    # Slots that are free while others queue are of no use to them: they wait for tokens.
    free = 0 if state.queued_requests else _slots(state, free=True)
    if state.queued_requests + max(0, preparing + choices - free) > room:
        raise overloaded(
            429,
            _full_queue(state.queued_requests, room, preparing, free, choices),
            retry_after_s=retry_after_s(queue_load(state, preparing)),
        )


def _full_queue(queued: int, room: int, preparing: int, free: int, choices: int) -> str:
    message = f"{queue_full(queued, room)}, {preparing} being prepared"
    if free:
        message += f" for {free} free slot{'' if free == 1 else 's'}"
    return message if choices == 1 else f"{message}, and this request asks for {choices} answers"


def queue_load(state: ServiceState, preparing: int) -> QueueLoad:
    """What a full queue waits for. Requests that prepare will take the slots that are free."""
    running = sum(owner.running for owner in state.owners if owner.status is WorkerStatus.READY)
    soon = min(preparing, _slots(state, free=True))
    return QueueLoad(serving=running + soon, places=max(1, state.max_queued_requests))


def _slots(state: ServiceState, *, free: bool) -> int:
    """Request slots of the ready owners, all of them or those without a request."""
    return sum(
        max(0, owner.capacity.request_slots - (owner.running if free else 0))
        for owner in state.owners
        if owner.status is WorkerStatus.READY and owner.capacity is not None
    )


def routed_rank(headers: Sequence[str], fields: GenerationFields, num_owners: int) -> int | None:
    """The owner that is asked for. Raises ApiError unless it exists.

    ``headers``: all that the request has of that name. The last one counts, since a router that
    passes on its client's adds its own behind it; and headers count before the body, which a
    router leaves alone when it has a header.
    """
    given = [value.strip() for header in headers for value in header.split(",")]
    if headers:
        name = "X-Data-Parallel-Rank"
        if not _RANK.fullmatch(given[-1]):
            raise invalid(
                name, f"it should be a rank from 0 to {num_owners - 1}, got {ascii(given[-1])[:40]}"
            )
        rank = int(given[-1])
    else:
        name, found = _rank_of_body(fields)
        if found is None:
            return None
        rank = found
    if rank >= num_owners:
        raise invalid(name, f"{rank} is out of range, ranks are 0 to {num_owners - 1}")
    return rank


def _rank_of_body(fields: GenerationFields) -> tuple[str, int | None]:
    """The field that asks for a rank, and which. Raises ApiError when two ask for different ones.

    Members of an object have no order: nothing tells a router's from its client's.
    """
    newer, older = fields.routed_dp_rank, fields.data_parallel_rank
    if newer is not None and older is not None and newer != older:
        raise invalid(
            "routed_dp_rank",
            f"it is {newer} and data_parallel_rank is {older}: give one of them, or both alike",
        )
    return ("data_parallel_rank", older) if newer is None else ("routed_dp_rank", newer)


def refuse_unready_rank(state: ServiceState, rank: int | None) -> None:
    """An explicit rank is strict: the request is never moved, so its owner must be ready.

    One that is replaced on request will be.
    """
    if rank is None:
        return
    for owner in state.owners:
        ready = owner.status is WorkerStatus.READY or owner.restarting
        if owner.owner == rank and not ready:
            raise overloaded(
                503,
                f"data-parallel rank {rank} is {owner.status.value}",
                retry_after_s=RETRY_ABSENT_S,
            )


def refuse_model(model: str | None, options: HttpOptions) -> None:
    """Raise ApiError when another model than the served one is asked for."""
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
    """Token ids that the model takes: its table's length, once an owner has loaded it."""
    sizes = [owner.shape.vocab_size for owner in state.owners if owner.shape is not None]
    return min(sizes, default=default)
