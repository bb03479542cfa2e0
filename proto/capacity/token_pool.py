"""The division of one worker's memory. The plan and the worker use the same estimate."""

from dataclasses import dataclass
from typing import Final

from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.capacity.ownership import (
    MAX_REQUEST_SLOTS,
    OwnerCapacity,
    OwnerSlice,
    auxiliary_ratio,
)
from mlx_dp.proto.errors import ConfigError

OVERHEAD_FRACTION: Final = 0.1
OVERHEAD_MIN_NBYTES: Final = 64 * 2**20
MIN_POOL_TOKENS: Final = 2
"""One token of prompt and one of answer: the least for a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDivision:
    """One worker's memory by use.

    ``tokens`` is the length of the longest single request that fits; None: any length.
    """

    weights_nbytes: int
    overhead_nbytes: int
    auxiliary_nbytes: int
    kv_nbytes: int
    tokens: int | None

    @property
    def cache_nbytes(self) -> int:
        """Bytes for rows, cached prefixes and states together."""
        return self.auxiliary_nbytes + self.kv_nbytes

    @property
    def total_nbytes(self) -> int:
        return self.weights_nbytes + self.overhead_nbytes + self.cache_nbytes


def pool_tokens(
    memory_nbytes: int | None, shape: ModelShape, share: OwnerSlice, *, prefix_cache: bool
) -> int | None:
    """Return the size of one owner's token pool; None: requests of any length fit."""
    return divide_memory(memory_nbytes, shape, share, prefix_cache=prefix_cache).tokens


def cache_nbytes(
    memory_nbytes: int | None,
    shape: ModelShape,
    share: OwnerSlice,
    capacity: OwnerCapacity,
    *,
    prefix_cache: bool,
) -> int | None:
    """Return the bytes for one owner's rows, cached prefixes and states; None: unlimited."""
    if memory_nbytes is not None:
        return divide_memory(memory_nbytes, shape, share, prefix_cache=prefix_cache).cache_nbytes
    if capacity.pool_tokens is None:
        return None
    states = capacity.auxiliary_slots * shape.auxiliary_bytes_per_slot
    return shape.kv_nbytes(capacity.pool_tokens) + states


def divide_memory(
    memory_nbytes: int | None, shape: ModelShape, share: OwnerSlice, *, prefix_cache: bool
) -> MemoryDivision:
    """Divide one worker's memory into weights, a reserve for activations, states and KV.

    ``max_total_tokens`` is never divided and replaces the profiled pool unless it is larger than
    that. Without a known amount of memory, one full context is assumed. Raises ConfigError when
    the weights do not fit, or leave room for less than one request.
    """
    if memory_nbytes is None:
        return _unmeasured(shape, share)
    overhead = overhead_nbytes(memory_nbytes)
    free = memory_nbytes - shape.weights_nbytes - overhead
    if free <= 0:
        raise ConfigError(
            f"the model does not fit: its weights take {_gb(shape.weights_nbytes)} and "
            f"activations {_gb(overhead)}, but one worker's share is {_gb(memory_nbytes)}: "
            "use fewer workers, a smaller model, or a larger --mem-fraction-static"
        )
    auxiliary = _auxiliary_nbytes(shape, share, free, prefix_cache=prefix_cache)
    profiled = shape.longest_request(free - auxiliary)
    if profiled is not None and profiled < MIN_POOL_TOKENS:
        raise ConfigError(
            f"one worker's share of {_gb(memory_nbytes)} leaves {profiled} KV tokens after "
            f"weights ({_gb(shape.weights_nbytes)}), activations ({_gb(overhead)}) and states "
            f"({_gb(auxiliary)}), but one request needs {MIN_POOL_TOKENS}: use fewer workers, a "
            "smaller model, or a larger --mem-fraction-static"
        )
    tokens, kv_nbytes = profiled, free - auxiliary if shape.has_kv else 0
    asked = share.max_total_tokens
    if asked is not None and shape.has_kv and (profiled is None or asked < profiled):
        tokens, kv_nbytes = asked, shape.kv_nbytes(asked)
    return MemoryDivision(
        weights_nbytes=shape.weights_nbytes,
        overhead_nbytes=overhead,
        auxiliary_nbytes=auxiliary,
        kv_nbytes=kv_nbytes,
        tokens=tokens,
    )


def overhead_nbytes(memory_nbytes: int) -> int:
    """Return the reserve for activations and the allocator's overhead, which no pool may use."""
    return max(OVERHEAD_MIN_NBYTES, int(memory_nbytes * OVERHEAD_FRACTION))


def _unmeasured(shape: ModelShape, share: OwnerSlice) -> MemoryDivision:
    tokens: int | None = None
    if shape.has_kv:
        tokens = share.max_total_tokens or shape.context_length
    return MemoryDivision(
        weights_nbytes=shape.weights_nbytes,
        overhead_nbytes=0,
        auxiliary_nbytes=0,
        kv_nbytes=shape.kv_nbytes(tokens or 0),
        tokens=tokens,
    )


def _auxiliary_nbytes(
    shape: ModelShape, share: OwnerSlice, free_nbytes: int, *, prefix_cache: bool
) -> int:
    """Return the bytes for states: as many as the slots need, at most half of the free bytes.

    Slots are a ceiling, not an allocation: thousands of them must not take all memory from KV.
    """
    slots = share.max_mamba_cache_size
    if slots is None:
        requests = share.max_running_requests or MAX_REQUEST_SLOTS
        slots = requests * auxiliary_ratio(prefix_cache=prefix_cache)
    wanted = slots * shape.auxiliary_bytes_per_slot
    if not shape.has_kv:
        return min(wanted, free_nbytes)
    return min(wanted, free_nbytes // 2)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
