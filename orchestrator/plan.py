"""Who will own what, worked out before any process starts, by the workers' own arithmetic."""

from dataclasses import dataclass

from mlx_dp.orchestrator import configuration
from mlx_dp.orchestrator.flags import Flags
from mlx_dp.orchestrator.planned_weights import PlannedWeights, shapes_by_process
from mlx_dp.orchestrator.preparation import PreparedModel
from mlx_dp.orchestrator.process.memory_share import share_memory
from mlx_dp.orchestrator.remote_plan import plan_remote
from mlx_dp.proto.messages import FakeEngineOptions
from mlx_dp.proto.model_shape import ModelShape, resolve_context_length
from mlx_dp.proto.ownership import OwnerCapacity, Ownership, OwnerSlice, resolve_capacity
from mlx_dp.proto.token_pool import MemoryDivision, divide_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOwner:
    """What one owner will hold. ``memory`` is None for the fake engine, which has no tensors."""

    owner: int
    process: int
    capacity: OwnerCapacity
    memory: MemoryDivision | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """The whole service as it will start. ``share_nbytes`` is one worker's memory."""

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
        held = tuple(owner.memory.weights_nbytes for owner in self.owners if owner.memory)
        return PlannedWeights(whole_nbytes=self.model.shape.weights_nbytes, by_process=held)


def make_plan(flags: Flags, ownership: Ownership, model: PreparedModel) -> ServicePlan:
    """Give every owner its part. Raises ConfigError when an owner could serve no request."""
    shape = model.shape
    of_model = flags.fake.fake_context_length if shape is None else shape.context_length
    resolve_context_length(flags.model.context_length, of_model)
    shapes = shapes_by_process(model, len(ownership.slices))
    share_nbytes: int | None = None
    if shapes and model.memory is not None:
        share_nbytes = share_memory(
            model.memory,
            max(shapes, key=lambda shape: shape.weights_nbytes),
            workers=max(1, len(shapes) - len(plan_remote(flags, ownership).ranks)),
            fraction=flags.owners.mem_fraction_static,
            divided=model.rank_weights is not None,
        )
    owners = tuple(
        _plan_owner(flags, share, shapes[process] if shapes else None, share_nbytes, process)
        for process, share in enumerate(ownership.slices)
    )
    warnings = [*ownership.warnings]
    warnings += _idle_flag_warnings(flags, model)
    # Owners are alike, so each sentence is said once.
    warnings += [text for owner in owners for text in _owner_warnings(flags, owner)]
    return ServicePlan(
        model=model,
        ownership=ownership,
        share_nbytes=share_nbytes,
        owners=owners,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def fake_pool_tokens(fake: FakeEngineOptions, share: OwnerSlice) -> int | None:
    """The fake engine's pool: like a profiled one, it bounds what the flag asks for."""
    if fake.pool_tokens is None or share.max_total_tokens is None:
        return fake.pool_tokens
    return min(fake.pool_tokens, share.max_total_tokens)


def _plan_owner(
    flags: Flags,
    share: OwnerSlice,
    shape: ModelShape | None,
    share_nbytes: int | None,
    process: int,
) -> PlannedOwner:
    prefix_cache = not flags.owners.disable_radix_cache
    memory: MemoryDivision | None = None
    if shape is None:
        hybrid = flags.fake.fake_hybrid
        tokens = fake_pool_tokens(configuration.fake_options(flags.fake), share)
    else:
        hybrid = shape.hybrid
        memory = divide_memory(share_nbytes, shape, share, prefix_cache=prefix_cache)
        tokens = memory.tokens
    capacity = resolve_capacity(share, pool_tokens=tokens, hybrid=hybrid, prefix_cache=prefix_cache)
    return PlannedOwner(owner=share.owner, process=process, capacity=capacity, memory=memory)


def _idle_flag_warnings(flags: Flags, model: PreparedModel) -> list[str]:
    """Name the flags that this model or engine has no use for."""
    warnings = []
    if model.shape is None and flags.model.model is not None:
        warnings.append("--model does nothing with --engine fake, which needs no model")
    hybrid = flags.fake.fake_hybrid if model.shape is None else model.shape.hybrid
    if flags.owners.max_mamba_cache_size is not None and not hybrid:
        warnings.append("--max-mamba-cache-size does nothing: this model has no auxiliary states")
    return warnings


def _owner_warnings(flags: Flags, owner: PlannedOwner) -> tuple[str, ...]:
    asked, tokens = flags.owners.max_total_tokens, owner.capacity.pool_tokens
    if asked is None or tokens is None or asked <= tokens:
        return owner.capacity.warnings
    cut = f"--max-total-tokens {asked} is more than one worker can hold: {tokens} are used"
    return (cut, *owner.capacity.warnings)
