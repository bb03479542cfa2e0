"""Plans what each owner will hold, before any process starts, by the workers' own arithmetic."""

from dataclasses import dataclass, replace
from typing import Final

from mlx_dp.orchestrator.config import configuration
from mlx_dp.orchestrator.config.flags import Flags
from mlx_dp.orchestrator.config.memory_share import share_memory
from mlx_dp.orchestrator.config.preparation import PreparedModel
from mlx_dp.orchestrator.config.remote_plan import plan_remote
from mlx_dp.proto.capacity.model_shape import ModelShape, resolve_context_length
from mlx_dp.proto.capacity.ownership import OwnerCapacity, Ownership, OwnerSlice, resolve_capacity
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.capacity.token_pool import MemoryDivision, divide_memory
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.commands import FakeEngineOptions
from mlx_dp.proto.messages.group import DistributedBackend

LEAST_TOKENS: Final = 1024
"""A short chat with its response. A worker that cannot hold that many is useless, unless the
model's context is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOwner:
    """The slots, tokens and bytes of one owner.

    ``memory`` is None for the fake engine, which has no tensors. ``capacity`` is None for a remote
    worker, whose memory is not known on this machine.
    """

    owner: int
    process: int
    capacity: OwnerCapacity | None
    memory: MemoryDivision | None = None
    weights_nbytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeights:
    """The weights of each process. ``whole_nbytes``: of the whole model."""

    whole_nbytes: int
    by_process: tuple[int, ...]

    @property
    def total_nbytes(self) -> int:
        """The bytes of all processes together."""
        return sum(self.by_process)

    @property
    def repeated_nbytes(self) -> int:
        """The bytes that every process holds a copy of."""
        others = len(self.by_process) - 1
        return (self.total_nbytes - self.whole_nbytes) // others if others else 0

    @property
    def divided_nbytes(self) -> int:
        """The bytes that are held once, in parts."""
        return self.whole_nbytes - self.repeated_nbytes if len(self.by_process) > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """The whole service as it will start. ``share_nbytes``: the memory of one local worker."""

    model: PreparedModel
    ownership: Ownership
    share_nbytes: int | None
    owners: tuple[PlannedOwner, ...]
    warnings: tuple[str, ...]

    @property
    def weights(self) -> PlannedWeights | None:
        """The weights of each process; None for the fake engine."""
        if self.model.shape is None:
            return None
        held = tuple(owner.weights_nbytes or 0 for owner in self.owners)
        return PlannedWeights(whole_nbytes=self.model.shape.weights_nbytes, by_process=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalWorkers:
    """The workers that run on this machine, and their memory."""

    ranks: tuple[int, ...]
    shapes: tuple[ModelShape, ...]
    """By process, remote ones included; empty for the fake engine."""
    share_nbytes: int | None


def make_plan(flags: Flags, ownership: Ownership, model: PreparedModel) -> ServicePlan:
    """Plan every owner's share. Raises ConfigError when an owner could serve no request."""
    shape = model.shape
    of_model = flags.fake.fake_context_length if shape is None else shape.context_length
    context_length = resolve_context_length(flags.model.context_length, of_model)
    local = _local_workers(flags, ownership, model)
    _check_backend(flags, ownership, model, local)
    owners = tuple(
        _plan_owner(flags, share, local, process) for process, share in enumerate(ownership.slices)
    )
    warnings = [*ownership.warnings]
    warnings += _unused_flag_warnings(flags, model)
    if model.unbatchable is not None:
        warnings.append(f"requests will run one by one: {model.unbatchable}")
    # Owners are alike, so duplicates are dropped below.
    warnings += [text for owner in owners for text in _owner_warnings(flags, owner)]
    warnings += [
        text
        for owner in owners
        for text in _pool_warnings(flags, ownership, model, local, owner, context_length)
    ]
    return ServicePlan(
        model=model,
        ownership=ownership,
        share_nbytes=local.share_nbytes,
        owners=owners,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _local_workers(flags: Flags, ownership: Ownership, model: PreparedModel) -> _LocalWorkers:
    """Divide this machine's memory. Raises ConfigError when the weights do not fit."""
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
    return _LocalWorkers(ranks=ranks, shapes=shapes, share_nbytes=share_nbytes)


def _check_backend(
    flags: Flags, ownership: Ownership, model: PreparedModel, local: _LocalWorkers
) -> None:
    """Refuse a backend that MLX lacks here, which a worker would find out only at its start."""
    backend = flags.owners.distributed_backend or DistributedBackend.RING
    group = ownership.mode is ReplicaMode.DP_ATTENTION
    if not group or not local.ranks or model.device is None:
        return
    built_in = model.device.backends
    if backend.value not in built_in:
        advice = (
            f"use {' or '.join(built_in)}" if built_in else "it has none, so use plain replicas"
        )
        raise ConfigError(
            f"--distributed-backend {backend.value} is not in this machine's build of MLX: {advice}"
        )


def fake_pool_tokens(fake: FakeEngineOptions, share: OwnerSlice) -> int | None:
    """The fake engine's pool, which bounds the flag as a profiled one does."""
    if fake.pool_tokens is None or share.max_total_tokens is None:
        return fake.pool_tokens
    return min(fake.pool_tokens, share.max_total_tokens)


def _plan_owner(
    flags: Flags, share: OwnerSlice, local: _LocalWorkers, process: int
) -> PlannedOwner:
    prefix_cache = not flags.owners.disable_radix_cache
    if not local.shapes:
        tokens = fake_pool_tokens(configuration.fake_options(flags.fake), share)
        hybrid = flags.fake.fake_hybrid
        capacity = resolve_capacity(
            share, pool_tokens=tokens, hybrid=hybrid, prefix_cache=prefix_cache
        )
        return PlannedOwner(owner=share.owner, process=process, capacity=capacity)
    shape = local.shapes[process]
    memory: MemoryDivision | None = None
    if process in local.ranks:
        memory = divide_memory(local.share_nbytes, shape, share, prefix_cache=prefix_cache)
    # A remote pool is not known yet, but what the flags alone rule out is refused now.
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


def _unused_flag_warnings(flags: Flags, model: PreparedModel) -> list[str]:
    """Warn of flags without effect for this model or engine."""
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


def _pool_warnings(
    flags: Flags,
    ownership: Ownership,
    model: PreparedModel,
    local: _LocalWorkers,
    owner: PlannedOwner,
    context_length: int,
) -> tuple[str, ...]:
    """Check the KV tokens of a local owner."""
    if owner.memory is None or local.share_nbytes is None or model.memory is None:
        return ()
    fewer: int | None = None
    if model.rank_weights is None:
        fraction = flags.owners.mem_fraction_static
        fewer = fewer_workers(
            [model.memory.share_nbytes(n, fraction) for n in range(1, len(local.ranks))],
            local.shapes[owner.process],
            ownership.slices[owner.process],
            prefix_cache=not flags.owners.disable_radix_cache,
            least=min(LEAST_TOKENS, context_length),
        )
    return pool_warnings(
        WorkerMemory(
            share_nbytes=local.share_nbytes,
            workers=len(local.ranks),
            memory=owner.memory,
            context_length=context_length,
            asked_tokens=flags.owners.max_total_tokens,
            fewer=fewer,
        )
    )


def shapes_by_process(model: PreparedModel, processes: int) -> tuple[ModelShape, ...]:
    """The shape that each process holds; empty for the fake engine.

    Raises ConfigError when the ranks of a group cannot divide this model.
    """
    if model.shape is None:
        return ()
    divided = model.rank_weights
    if divided is None:
        return (model.shape,) * processes
    if divided.refusal is not None:
        raise ConfigError(divided.refusal)
    assert len(divided.nbytes) == processes, (divided, processes)
    return tuple(replace(model.shape, weights_nbytes=nbytes) for nbytes in divided.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """One worker's share of memory, and its division. ``asked_tokens``: --max-total-tokens."""

    share_nbytes: int
    workers: int
    memory: MemoryDivision
    context_length: int
    asked_tokens: int | None
    fewer: int | None = None
    """The largest number of workers that would hold enough, if fewer would."""


def pool_warnings(worker: WorkerMemory) -> tuple[str, ...]:
    """Warn when the pool is smaller than the context.

    Raises ConfigError when it is too small for a chat, unless so few tokens were requested.
    """
    tokens = worker.memory.tokens
    if tokens is None or tokens >= worker.context_length or tokens == worker.asked_tokens:
        return ()
    least = min(LEAST_TOKENS, worker.context_length)
    if tokens < least:
        raise ConfigError(_refusal(worker, tokens, least))
    more = "fewer workers" if worker.workers > 1 else "a smaller model"
    return (
        f"each worker holds {tokens:,} KV tokens, and the model's context is "
        f"{worker.context_length:,}: longer requests are refused; {more} or a larger "
        "--mem-fraction-static would leave more",
    )


def fewer_workers(
    shares: list[int], shape: ModelShape, share: OwnerSlice, *, prefix_cache: bool, least: int
) -> int | None:
    """The largest number of workers with ``least`` tokens each; ``shares[n - 1]``: share of n."""
    for count in range(len(shares), 0, -1):
        try:
            memory = divide_memory(shares[count - 1], shape, share, prefix_cache=prefix_cache)
        except ConfigError:
            continue
        if memory.tokens is None or memory.tokens >= least:
            return count
    return None


def _refusal(worker: WorkerMemory, tokens: int, least: int) -> str:
    memory = worker.memory
    states = f" and {_gb(memory.auxiliary_nbytes)} of states" if memory.auxiliary_nbytes else ""
    fewer = "" if worker.fewer is None else f"--dp-size {worker.fewer}, "
    count = "1 worker" if worker.workers == 1 else f"{worker.workers} workers"
    return (
        f"{count} with {_gb(worker.share_nbytes)} each hold {tokens:,} KV tokens each, after "
        f"{_gb(memory.weights_nbytes)} of weights, {_gb(memory.overhead_nbytes)} for activations"
        f"{states}, and a chat needs {least:,}: use {fewer}a larger --mem-fraction-static or a "
        f"smaller model, or --max-total-tokens {tokens} if so few will do"
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
