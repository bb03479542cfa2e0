"""An owner in each stage of its start, for tests."""

from dataclasses import replace

from mlx_dp.orchestrator.api import OwnerState, WorkerStatus
from mlx_dp.proto.capacity.ownership import OwnerCapacity

QUEUED = OwnerState(
    dp_rank=0,
    status=WorkerStatus.STARTING,
    pid=None,
    incarnation="",
    restarts=0,
    capacity=None,
    shape=None,
    context_length=None,
    device="",
    running=0,
    prefilling=0,
    used_tokens=0,
    reserved_tokens=0,
    auxiliary_used=0,
    rss_nbytes=0,
    device_nbytes=0,
    prefix_tokens=0,
    prefix_nbytes=0,
    held_nbytes=0,
    held_buffers=0,
    buffer_limit=None,
    step=0,
    prompt_tokens_total=0,
    cached_tokens_total=0,
    generated_tokens_total=0,
    preemptions_total=0,
    generation_tokens_per_s=0.0,
    phase="",
)
LOADING = replace(QUEUED, pid=1, phase="loading")
WARMING = replace(QUEUED, pid=1, phase="warming")
READY = replace(
    QUEUED,
    pid=1,
    status=WorkerStatus.READY,
    phase="serving",
    capacity=OwnerCapacity(request_slots=8, auxiliary_slots=0, pool_tokens=1000),
)
