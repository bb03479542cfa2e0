"""GET /v1/models, and what routers ask to know which model a server has."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from mlx_dp.orchestrator.http.admission import unknown_model
from mlx_dp.orchestrator.http.endpoint import Endpoint
from mlx_dp.orchestrator.service import OwnerState
from mlx_dp.proto.parallel import ReplicaMode

# smg chooses by this what it asks next: as "sglang" it reads /v1/loads, which we have.
OWNED_BY: Final = "sglang"


def models(endpoint: Endpoint) -> Mapping[str, Any]:
    names = endpoint.options.served_model_names
    return {"object": "list", "data": [_card(endpoint, name) for name in names]}


def model(endpoint: Endpoint, name: str) -> Mapping[str, Any]:
    """The card of a name that is taken. A slash beside it is the base URL's."""
    options = endpoint.options
    for known in (name, name.rstrip("/"), name.strip("/")):
        if known in options.served_model_names or known in options.own_model_names:
            return _card(endpoint, known)
    raise unknown_model(name, options)


def _card(endpoint: Endpoint, name: str) -> Mapping[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": endpoint.created,
        "owned_by": OWNED_BY,
        "root": endpoint.text.facts.path,
        "parent": None,
        "max_model_len": endpoint.max_model_len(),
    }


def server_version() -> Mapping[str, Any]:
    return {"version": version("mlx-dp")}


def model_info(endpoint: Endpoint) -> Mapping[str, Any]:
    facts = endpoint.text.facts
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


def server_info(endpoint: Endpoint) -> Mapping[str, Any]:
    """SGLang's fields that routers read, and the state of every owner."""
    state = endpoint.service.state()
    facts = endpoint.text.facts
    slots = [owner.capacity.request_slots for owner in state.owners if owner.capacity]
    pools = [
        owner.capacity.pool_tokens
        for owner in state.owners
        if owner.capacity and owner.capacity.pool_tokens is not None
    ]
    return {
        "model_path": facts.path,
        "tokenizer_path": facts.path,
        "served_model_name": endpoint.model,
        "version": version("mlx-dp"),
        "tp_size": state.tp_size,
        "dp_size": len(state.owners),
        "pp_size": 1,
        "enable_dp_attention": state.mode is ReplicaMode.DP_ATTENTION,
        "load_balance_method": state.load_balance_method,
        "disaggregation_mode": "null",
        "context_length": endpoint.context_length(),
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
    """What SGLang's clients read of each scheduler. Memory is in GB there, and only there."""
    capacity, shape = owner.capacity, owner.shape
    pool = (capacity.pool_tokens if capacity else None) or 0
    kv_nbytes = pool * shape.kv_bytes_per_token if shape else 0
    return {
        "dp_rank": owner.owner,
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
        "dp_rank": owner.owner,
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
