"""Who will own what, worked out before any process starts, by the workers' own arithmetic."""

from dataclasses import dataclass

from mlx_dp.orchestrator import configuration
from mlx_dp.orchestrator.flags import Flags
from mlx_dp.orchestrator.planned_weights import PlannedWeights, shapes_by_process
from mlx_dp.orchestrator.pool_floor import (
    LEAST_TOKENS,
    WorkerRoom,
    fewer_workers,
    pool_warnings,
)
from mlx_dp.orchestrator.preparation import PreparedModel
from mlx_dp.orchestrator.process.memory_share import share_memory
from mlx_dp.orchestrator.remote_plan import plan_remote
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.group import DistributedBackend
from mlx_dp.proto.messages import FakeEngineOptions
from mlx_dp.proto.model_shape import ModelShape, resolve_context_length
from mlx_dp.proto.ownership import OwnerCapacity, Ownership, OwnerSlice, resolve_capacity
from mlx_dp.proto.parallel import ReplicaMode
from mlx_dp.proto.token_pool import MemoryDivision, divide_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOwner:
    """What one owner will hold. ``memory`` is None for the fake engine, which has no tensors.

    ``capacity`` is None for a worker whose memory is another machine's to tell.
    """

    owner: int
    process: int
    capacity: OwnerCapacity | None
    memory: MemoryDivision | None = None
    weights_nbytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """The whole service as it will start. ``share_nbytes`` is the memory of one worker here."""

    model: PreparedModel
    ownership: Ownership
    share_nbytes: int | None
    owners: tuple[PlannedOwner, ...]
    warnings: tuple[str, ...]

    @property
    def weights(self) -> PlannedWeights | None:
        """How the weights lie in the processes; None for the fake engine."""
        if self.model.shape is None:
            return None
        held = tuple(owner.weights_nbytes or 0 for owner in self.owners)
        return PlannedWeights(whole_nbytes=self.model.shape.weights_nbytes, by_process=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """What this machine has for the workers that run on it."""

    ranks: tuple[int, ...]
    shapes: tuple[ModelShape, ...]
    """By process, those on other machines too; empty for the fake engine."""
    share_nbytes: int | None


def make_plan(flags: Flags, ownership: Ownership, model: PreparedModel) -> ServicePlan:
    """Give every owner its part. Raises ConfigError when an owner could serve no request."""
    shape = model.shape
    of_model = flags.fake.fake_context_length if shape is None else shape.context_length
    context_length = resolve_context_length(flags.model.context_length, of_model)
    here = _here(flags, ownership, model)
    _check_backend(flags, ownership, model, here)
    owners = tuple(
        _plan_owner(flags, share, here, process) for process, share in enumerate(ownership.slices)
    )
    warnings = [*ownership.warnings]
    warnings += _idle_flag_warnings(flags, model)
    if model.unbatchable is not None:
        warnings.append(f"requests will run one by one: {model.unbatchable}")
    # Owners are alike, so each sentence is said once.
    warnings += [text for owner in owners for text in _owner_warnings(flags, owner)]
    warnings += [
        text
        for owner in owners
        for text in _room_warnings(flags, ownership, model, here, owner, context_length)
    ]
    return ServicePlan(
        model=model,
        ownership=ownership,
        share_nbytes=here.share_nbytes,
        owners=owners,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _here(flags: Flags, ownership: Ownership, model: PreparedModel) -> _Here:
    """Share out this machine's memory. Raises ConfigError where the weights do not fit."""
    shapes = shapes_by_process(model, len(ownership.slices))
    remote = plan_remote(flags, ownership).ranks
    ranks = tuple(rank for rank in range(len(ownership.slices)) if rank not in remote)
    share_nbytes: int | None = None
    if shapes and ranks and model.memory is not None:
        share_nbytes = share_memory(
            model.memory,
            max((shapes[rank] for rank in ranks), key=lambda shape: shape.weights_nbytes),
            workers=len(ranks),
            fraction=flags.owners.mem_fraction_static,
            divided=model.rank_weights is not None,
        )
    return _Here(ranks=ranks, shapes=shapes, share_nbytes=share_nbytes)


def _check_backend(flags: Flags, ownership: Ownership, model: PreparedModel, here: _Here) -> None:
    """Refuse what MLX has not been built with here: a worker would find out only at its start."""
    backend = flags.owners.distributed_backend or DistributedBackend.RING
    group = ownership.mode is ReplicaMode.DP_ATTENTION
    if not group or not here.ranks or model.device is None:
        return
    there = model.device.backends
    if backend.value not in there:
        advice = f"use {' or '.join(there)}" if there else "it has none, so use plain replicas"
        raise ConfigError(
            f"--distributed-backend {backend.value} is not in this machine's build of MLX: {advice}"
        )


def fake_pool_tokens(fake: FakeEngineOptions, share: OwnerSlice) -> int | None:
    """The fake engine's pool: like a profiled one, it bounds what the flag asks for."""
    if fake.pool_tokens is None or share.max_total_tokens is None:
        return fake.pool_tokens
    return min(fake.pool_tokens, share.max_total_tokens)


def _plan_owner(flags: Flags, share: OwnerSlice, here: _Here, process: int) -> PlannedOwner:
    prefix_cache = not flags.owners.disable_radix_cache
    if not here.shapes:
        tokens = fake_pool_tokens(configuration.fake_options(flags.fake), share)
        hybrid = flags.fake.fake_hybrid
        capacity = resolve_capacity(
            share, pool_tokens=tokens, hybrid=hybrid, prefix_cache=prefix_cache
        )
        return PlannedOwner(owner=share.owner, process=process, capacity=capacity)
    shape = here.shapes[process]
    memory: MemoryDivision | None = None
    if process in here.ranks:
        memory = divide_memory(here.share_nbytes, shape, share, prefix_cache=prefix_cache)
    # That of another machine is not known: what the flags alone rule out is refused all the same.
    capacity = resolve_capacity(
        share,
        pool_tokens=None if memory is None else memory.tokens,
        hybrid=shape.hybrid,
        prefix_cache=prefix_cache,
    )
    return PlannedOwner(
        owner=share.owner,
        process=process,
        capacity=None if memory is None else capacity,
        memory=memory,
        weights_nbytes=shape.weights_nbytes,
    )


def _idle_flag_warnings(flags: Flags, model: PreparedModel) -> list[str]:
    """Name the flags that this model or engine has no use for."""
    warnings = []
    hybrid = flags.fake.fake_hybrid if model.shape is None else model.shape.hybrid
    if flags.owners.max_mamba_cache_size is not None and not hybrid:
        warnings.append("--max-mamba-cache-size does nothing: this model has no auxiliary states")
    if flags.owners.max_total_tokens is not None and model.shape and not model.shape.has_kv:
        warnings.append("--max-total-tokens does nothing: this model has no attention KV")
    return warnings


def _owner_warnings(flags: Flags, owner: PlannedOwner) -> tuple[str, ...]:
    if owner.capacity is None:
        return ()
    asked, tokens = flags.owners.max_total_tokens, owner.capacity.pool_tokens
    if asked is None or tokens is None or asked <= tokens:
        return owner.capacity.warnings
    cut = f"--max-total-tokens {asked} is more than one worker can hold: {tokens} are used"
    return (cut, *owner.capacity.warnings)


def _room_warnings(
    flags: Flags,
    ownership: Ownership,
    model: PreparedModel,
    here: _Here,
    owner: PlannedOwner,
    context_length: int,
) -> tuple[str, ...]:
    """What ``pool_floor`` says of an owner whose memory was shared out here."""
    if owner.memory is None or here.share_nbytes is None or model.memory is None:
        return ()
    fewer: int | None = None
    if model.rank_weights is None:
        fraction = flags.owners.mem_fraction_static
        fewer = fewer_workers(
            [model.memory.of_one(n, fraction) for n in range(1, len(here.ranks))],
            here.shapes[owner.process],
            ownership.slices[owner.process],
            prefix_cache=not flags.owners.disable_radix_cache,
            least=min(LEAST_TOKENS, context_length),
        )
    return pool_warnings(
        WorkerRoom(
            share_nbytes=here.share_nbytes,
            workers=len(here.ranks),
            memory=owner.memory,
            context_length=context_length,
            asked_tokens=flags.owners.max_total_tokens,
            fewer=fewer,
        )
    )
