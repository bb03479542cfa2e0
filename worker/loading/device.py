"""All differences between devices."""

import mmap
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import psutil

from mlx_dp.proto.messages.group import DistributedBackend

CACHE_FRACTION: Final = 0.1
MIN_CACHE_NBYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes that MLX holds: ``active_nbytes`` in arrays, ``cached_nbytes`` free for reuse."""

    active_nbytes: int
    cached_nbytes: int


def facts() -> dict[str, Any]:
    """Return the device's kind, name and memory, for the controller's plan.

    ``working_set_nbytes`` is the system's recommended maximum, or all memory if there is none.
    """
    info = _info()
    total = int(
        info.get("memory_size") or info.get("total_memory") or psutil.virtual_memory().total
    )
    return {
        "kind": kind(),
        "name": str(info.get("device_name") or info.get("architecture") or "unknown"),
        "memory_nbytes": total,
        "working_set_nbytes": int(info.get("max_recommended_working_set_size") or total),
        "backends": backends(),
    }


def backends() -> tuple[str, ...]:
    """Return the distributed backends of this build of MLX."""
    names = (backend.value for backend in DistributedBackend)
    return tuple(name for name in names if mx.distributed.is_available(name))


def kind() -> str:
    """Return MLX's default device: ``metal``, ``cuda`` or ``cpu``."""
    if mx.default_device() != mx.Device(mx.gpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def launch_blocks() -> bool:
    """Guess, until it is measured, whether ``async_eval`` of a model blocks until nearly done.

    On a CPU it does, since MLX queues only a few tasks there.
    """
    return kind() == "cpu"


def warm_up_s() -> float:
    """Return the longest warm-up: a GPU compiles each kernel at its first use, a CPU does not."""
    return 2.0 if kind() == "cpu" else 30.0


def describe() -> str:
    """Describe the device for people."""
    known = facts()
    return f"{known['kind']} ({known['name']})"


def buffer_limit() -> int | None:
    """Return the number of buffers that a worker may hold; None: the device has no limit.

    Metal refuses allocations beyond ``resource_limit`` buffers of a process. Half of them are left
    for activations and for command buffers under way.
    """
    limit = _info().get("resource_limit")
    return None if limit is None else int(limit) // 2


def page_nbytes() -> int:
    """Return the unit of allocations: a page on Metal."""
    return mmap.PAGESIZE if kind() == "metal" else 1


def limit_memory(share_nbytes: int | None) -> None:
    """Keep the allocator within this worker's share, as far as MLX's guidelines reach.

    Allocations beyond the limit still succeed, so admission must keep within it; the limit only
    makes MLX free cached buffers. None leaves MLX's defaults.
    """
    if share_nbytes is None:
        return
    mx.set_memory_limit(share_nbytes)
    mx.set_cache_limit(_free_buffers_nbytes(share_nbytes))


def limit_free_buffers(share_nbytes: int | None, pool_nbytes: int | None) -> None:
    """Limit the free buffers that MLX keeps to what this worker's pool can reuse.

    MLX always fills its cache up to the limit: with a pool of a few megabytes, a tenth of a large
    share would be wasted. None: unknown.
    """
    if pool_nbytes is None:
        return
    limit = max(MIN_CACHE_NBYTES, pool_nbytes)
    if share_nbytes is not None:
        limit = min(limit, _free_buffers_nbytes(share_nbytes))
    mx.set_cache_limit(limit)


def _free_buffers_nbytes(share_nbytes: int) -> int:
    """Return the most bytes of free buffers for a worker with this share."""
    return max(MIN_CACHE_NBYTES, int(share_nbytes * CACHE_FRACTION))


def wire_weights(weights_nbytes: int) -> None:
    """Wire no more than this worker's own weights.

    Several processes that each wire the recommended maximum hang or panic the machine (mlx #3186,
    mlx-lm PR #1252).
    """
    if kind() != "metal":
        return
    mx.set_wired_limit(min(weights_nbytes, int(facts()["working_set_nbytes"])))


def memory() -> DeviceMemory:
    return DeviceMemory(active_nbytes=mx.get_active_memory(), cached_nbytes=mx.get_cache_memory())


def _info() -> dict[str, Any]:
    info: dict[str, Any] = mx.device_info()
    return info
