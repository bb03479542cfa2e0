"""Divides the limits among owners. No other module divides them.

The arithmetic is SGLang's MLX rule (sglang #30547, #32115): ``max_running_requests`` and an
explicit ``max_mamba_cache_size`` are divided by ``attn_dp_size`` and never by ``dp_size``, so they
are per replica under data-parallel and for the whole group under dp-attention.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from mlx_dp.proto.capacity.model_shape import Count
from mlx_dp.proto.capacity.parallel import ParallelState, ReplicaMode, Topology
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.fields import Warnings

MAX_REQUEST_SLOTS: Final = 4096
AUXILIARY_SLOTS_WITH_PREFIX_CACHE: Final = 4
"""One live state and three for tracked prefixes."""

MAX_LIMIT: Final = 2**20
MAX_TOTAL_TOKENS: Final = 2**53 - 1

Slots = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits as the user gave them, in the units of the flags. None: not given."""

    max_running_requests: int | None = None
    max_mamba_cache_size: int | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSlice:
    """One owner's share, before its model is loaded.

    ``undivided_max_mamba_cache_size`` is the flag's value, since errors speak in the user's units.
    """

    parallel: ParallelState
    max_running_requests: Slots | None = None
    max_mamba_cache_size: Count | None = None
    max_total_tokens: Annotated[int, Meta(ge=1, lt=2**53)] | None = None
    undivided_max_mamba_cache_size: Count | None = None

    @property
    def owner(self) -> int:
        return self.parallel.owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """The whole map, computed once. ``warnings`` are sentences for the start-up log."""

    mode: ReplicaMode
    slices: tuple[OwnerSlice, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerCapacity:
    """The capacity of one owner. Slots are a ceiling, not an allocation.

    ``pool_tokens`` is None for a model without attention KV.
    """

    request_slots: Slots
    auxiliary_slots: Count
    pool_tokens: Count | None
    cache_nbytes: Count | None = None
    """The bytes for rows, cached prefixes and states together; None: unlimited."""
    warnings: Warnings = ()


def divide(topology: Topology, limits: Limits) -> Ownership:
    """Give every owner its share of the limits.

    Raises ConfigError when a limit is out of range or leaves an owner with nothing.
    """
    for flag, value, most in (
        ("--max-running-requests", limits.max_running_requests, MAX_LIMIT),
        ("--max-mamba-cache-size", limits.max_mamba_cache_size, MAX_LIMIT),
        ("--max-total-tokens", limits.max_total_tokens, MAX_TOTAL_TOKENS),
    ):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{flag} {value} is out of range: use 1 to {most}, or omit the flag")
    owners = topology.attn_dp_size
    warnings = list(topology.warnings)
    requests, requests_warning = _share(
        "--max-running-requests", limits.max_running_requests, owners
    )
    if requests == 0:
        raise ConfigError(
            f"--max-running-requests {limits.max_running_requests} leaves 0 request slots per "
            f"owner (attn_dp_size={owners}): use at least {owners}, or omit the flag"
        )
    auxiliary, auxiliary_warning = _share(
        "--max-mamba-cache-size", limits.max_mamba_cache_size, owners
    )
    warnings += [text for text in (requests_warning, auxiliary_warning) if text]
    slices = tuple(
        OwnerSlice(
            parallel=parallel,
            max_running_requests=requests,
            max_mamba_cache_size=auxiliary,
            max_total_tokens=limits.max_total_tokens,
            undivided_max_mamba_cache_size=limits.max_mamba_cache_size,
        )
        for parallel in topology.members()
    )
    return Ownership(mode=topology.mode, slices=slices, warnings=tuple(warnings))


def _share(flag: str, value: int | None, owners: int) -> tuple[int | None, str | None]:
    if value is None:
        return None, None
    share, remainder = divmod(value, owners)
    if share == 0 or remainder == 0:
        return share, None
    return share, (
        f"{flag} {value} is not divisible by attn_dp_size={owners}: "
        f"{share} per owner, {remainder} unused"
    )


def auxiliary_ratio(*, prefix_cache: bool) -> int:
    """Return the auxiliary slots that one running request of a hybrid model needs."""
    return AUXILIARY_SLOTS_WITH_PREFIX_CACHE if prefix_cache else 1


def resolve_capacity(
    share: OwnerSlice, *, pool_tokens: int | None, hybrid: bool, prefix_cache: bool
) -> OwnerCapacity:
    """Resolve one owner's slots once its model is loaded and its token pool is known.

    Raises ConfigError when not even one request fits.
    """
    requested = share.max_running_requests
    slots = MAX_REQUEST_SLOTS if requested is None else requested
    if pool_tokens is not None:
        slots = min(slots, pool_tokens // 2)
    if slots == 0:
        raise ConfigError(
            f"a pool of {pool_tokens} KV tokens backs no request (each needs 2): raise "
            "--max-total-tokens or --mem-fraction-static, or use fewer workers"
        )
    warnings: tuple[str, ...] = ()
    if requested is not None and slots < requested:
        warnings = (
            f"--max-running-requests gives {requested} request slots per owner, but "
            f"{pool_tokens} KV tokens back only {slots}",
        )
    if not hybrid:
        return OwnerCapacity(
            request_slots=slots, auxiliary_slots=0, pool_tokens=pool_tokens, warnings=warnings
        )
    backed, auxiliary_slots = _auxiliary(share, slots, prefix_cache=prefix_cache)
    if requested is not None and backed < slots:
        warnings += (
            f"--max-running-requests gives {requested} request slots per owner, but "
            f"{auxiliary_slots} auxiliary slots back only {backed}",
        )
    return OwnerCapacity(
        request_slots=backed,
        auxiliary_slots=auxiliary_slots,
        pool_tokens=pool_tokens,
        warnings=warnings,
    )


def _auxiliary(share: OwnerSlice, slots: int, *, prefix_cache: bool) -> tuple[int, int]:
    """Return (request slots, auxiliary slots) of a hybrid model's owner."""
    ratio = auxiliary_ratio(prefix_cache=prefix_cache)
    auxiliary = share.max_mamba_cache_size
    if auxiliary is None:
        return slots, slots * ratio
    backed = auxiliary // ratio
    if backed == 0:
        owners = share.parallel.attn_dp_size
        raise ConfigError(
            f"--max-mamba-cache-size {share.undivided_max_mamba_cache_size} leaves {auxiliary} "
            f"auxiliary slots per owner (attn_dp_size={owners}), which back 0 requests, since each "
            f"needs {ratio}: use at least {ratio * owners}, or omit the flag"
        )
    return min(slots, backed), auxiliary


def divide_prefill(chunked_prefill_size: int, *, ranks: int) -> int:
    """Return each rank's share of a step's prompt tokens: all ranks run the same passes."""
    return max(1, chunked_prefill_size // ranks)
