"""GET /v1/loads and /get_load: the load of each owner, with SGLang's field names.

The service has one queue and binds late, so nothing waits at an owner: the queue appears only in
the aggregate. SGLang's schemas change, so the aggregate has older and newer names.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mlx_dp.orchestrator.api import OwnerState, ServiceState
from mlx_dp.orchestrator.http.routes.context import AppContext


def loads(context: AppContext) -> Mapping[str, Any]:
    """The body of GET /v1/loads."""
    state = context.service.state()
    owners = [_owner(owner) for owner in state.owners]
    now = time.time()
    return {
        "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
        "version": "1",
        "dp_rank_count": len(owners),
        "loads": owners,
        "aggregate": _aggregate(state, owners),
    }


def get_load(context: AppContext) -> Sequence[Mapping[str, Any]]:
    """The body of GET /get_load, which has no place for the queue."""
    return [
        {
            "dp_rank": owner.dp_rank,
            "num_reqs": owner.running,
            "num_waiting_reqs": 0,
            "num_tokens": owner.used_tokens,
            "ts_tic": time.monotonic(),
        }
        for owner in context.service.state().owners
    ]


def _owner(owner: OwnerState) -> Mapping[str, Any]:
    pool = (owner.capacity.pool_tokens if owner.capacity else None) or 0
    slots = owner.capacity.request_slots if owner.capacity else 0
    return {
        "dp_rank": owner.dp_rank,
        "status": owner.status.value,
        "num_running_reqs": owner.running,
        "num_waiting_reqs": 0,
        "num_waiting_uncached_tokens": 0,
        "num_total_reqs": owner.running,
        "num_used_tokens": owner.used_tokens,
        "num_reserved_tokens": owner.reserved_tokens,
        "num_total_tokens": owner.used_tokens,
        "max_total_num_tokens": pool,
        "token_usage": _ratio(owner.used_tokens, pool),
        "gen_throughput": owner.generation_tokens_per_s,
        "cache_hit_rate": _ratio(owner.cached_tokens_total, owner.prompt_tokens_total),
        "prefix_cache_tokens": owner.prefix_tokens,
        "prefix_cache_nbytes": owner.prefix_nbytes,
        "held_nbytes": owner.held_nbytes,
        "budget_nbytes": owner.budget_nbytes,
        "held_buffers": owner.held_buffers,
        "buffer_limit": owner.buffer_limit,
        "utilization": _ratio(owner.running, slots),
        "max_running_requests": slots,
    }


def _aggregate(state: ServiceState, owners: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    def total(name: str) -> Any:
        return sum(owner[name] for owner in owners)

    running, used = total("num_running_reqs"), total("num_used_tokens")
    waiting, waiting_tokens = state.queued_requests, state.queued_tokens
    pool, slots = total("max_total_num_tokens"), total("max_running_requests")
    prompt = sum(owner.prompt_tokens_total for owner in state.owners)
    cached = sum(owner.cached_tokens_total for owner in state.owners)
    newer = {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": waiting_tokens,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + waiting_tokens,
        "max_total_num_tokens": pool,
        "token_usage": _ratio(used, pool),
        "gen_throughput": total("gen_throughput"),
        "cache_hit_rate": _ratio(cached, prompt),
        "utilization": _ratio(running, slots),
        "max_running_requests": slots,
    }
    older = {
        "total_running_reqs": running,
        "total_waiting_reqs": waiting,
        "total_reqs": running + waiting,
        "total_used_tokens": used,
        "total_tokens": used + waiting_tokens,
        "avg_token_usage": _ratio(used, pool),
        "avg_throughput": _ratio(newer["gen_throughput"], len(owners)),
        "avg_utilization": _ratio(running, slots),
    }
    return {**newer, **older}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
