"""GET /v1/models, /server_info and /model_info: the model, for clients and routers."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from mlx_dp.orchestrator.api import OwnerState
from mlx_dp.orchestrator.http.preparation.prechecks import unknown_model
from mlx_dp.orchestrator.http.routes.context import AppContext
from mlx_dp.proto.capacity.parallel import ReplicaMode

# smg chooses its next requests by this. For "sglang" it reads /v1/loads, which exists here.
OWNED_BY: Final = "sglang"


def models(context: AppContext) -> Mapping[str, Any]:
    names = context.options.served_model_names
    return {"object": "list", "data": [_card(context, name) for name in names]}


def model(context: AppContext, name: str) -> Mapping[str, Any]:
    """Return the card of a known name. Slashes around the name come from base URLs."""
    options = context.options
    for known in (name, name.rstrip("/"), name.strip("/")):
        if known in options.served_model_names or known in options.own_model_names:
            return _card(context, known)
    raise unknown_model(name, options)


def _card(context: AppContext, name: str) -> Mapping[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": OWNED_BY,
        "root": context.text.facts.path,
        "parent": None,
        "max_model_len": context.max_model_len(),
    }


def server_version() -> Mapping[str, Any]:
    return {"version": version("mlx-dp")}


def model_info(context: AppContext) -> Mapping[str, Any]:
    facts = context.text.facts
    return {
        "model_path": facts.path,
        "tokenizer_path": facts.path,
        "is_generation": True,
        "model_type": facts.model_type,
        "architectures": list(facts.architectures),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }


def server_info(context: AppContext) -> Mapping[str, Any]:
    """SGLang's fields that routers read, and the state of every owner."""
    state = context.service.state()
    facts = context.text.facts
    slots = [owner.capacity.request_slots for owner in state.owners if owner.capacity]
    pools = [
        owner.capacity.pool_tokens
        for owner in state.owners
        if owner.capacity and owner.capacity.pool_tokens is not None
    ]
    return {
        "model_path": facts.path,
        "tokenizer_path": facts.path,
        "served_model_name": context.model,
        "version": version("mlx-dp"),
        "tp_size": state.tp_size,
        "dp_size": len(state.owners),
        "pp_size": 1,
        "enable_dp_attention": state.mode is ReplicaMode.DP_ATTENTION,
        "load_balance_method": state.load_balance_method,
        "disaggregation_mode": "null",
        "context_length": context.context_length(),
        # Per owner, as in SGLang; the smallest, since any owner may get a request.
        "max_total_tokens": min(pools, default=None),
        "max_total_num_tokens": min(pools, default=None),
        "max_running_requests": min(slots, default=None),
        "max_queued_requests": state.max_queued_requests,
        "is_embedding": False,
        "weight_version": "default",
        "status": state.status.value,
        "owners": [_owner(owner) for owner in state.owners],
        "internal_states": [_internal_state(owner) for owner in state.owners],
    }


def _internal_state(owner: OwnerState) -> Mapping[str, Any]:
    """SGLang's state of each scheduler, as far as clients read it. Only here is memory in GB."""
    capacity, shape = owner.capacity, owner.shape
    pool = (capacity.pool_tokens if capacity else None) or 0
    kv_nbytes = pool * shape.kv_bytes_per_token if shape else 0
    return {
        "dp_rank": owner.dp_rank,
        "last_gen_throughput": owner.generation_tokens_per_s,
        "effective_max_running_requests_per_dp": capacity.request_slots if capacity else 0,
        "max_total_num_tokens": pool,
        "memory_usage": {
            "weight": round(shape.weights_nbytes / 1e9, 2) if shape else 0.0,
            "kvcache": round(kv_nbytes / 1e9, 2),
            "token_capacity": pool,
            "graph": 0.0,
        },
    }


def _owner(owner: OwnerState) -> Mapping[str, Any]:
    capacity = owner.capacity
    return {
        "dp_rank": owner.dp_rank,
        "status": owner.status.value,
        "phase": owner.phase,
        "message": owner.message,
        "pid": owner.pid,
        "incarnation": owner.incarnation,
        "restarts": owner.restarts,
        "device": owner.device,
        "step": owner.step,
        "num_running_reqs": owner.running,
        "num_prefilling_reqs": owner.prefilling,
        "num_used_tokens": owner.used_tokens,
        "num_reserved_tokens": owner.reserved_tokens,
        "auxiliary_used": owner.auxiliary_used,
        "max_running_requests": capacity.request_slots if capacity else None,
        "max_mamba_cache_size": capacity.auxiliary_slots if capacity else None,
        "max_total_num_tokens": capacity.pool_tokens if capacity else None,
        "context_length": owner.context_length,
        "rss_nbytes": owner.rss_nbytes,
        "device_nbytes": owner.device_nbytes,
        "weights_nbytes": owner.shape.weights_nbytes if owner.shape else None,
        "prefix_cache_tokens": owner.prefix_tokens,
        "prefix_cache_nbytes": owner.prefix_nbytes,
        "held_nbytes": owner.held_nbytes,
        "budget_nbytes": owner.budget_nbytes,
        "held_buffers": owner.held_buffers,
        "buffer_limit": owner.buffer_limit,
        "prompt_tokens_total": owner.prompt_tokens_total,
        "cached_tokens_total": owner.cached_tokens_total,
        "generated_tokens_total": owner.generated_tokens_total,
        "preemptions_total": owner.preemptions_total,
        "gen_throughput": owner.generation_tokens_per_s,
    }
