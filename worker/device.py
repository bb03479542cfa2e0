"""The one place that knows how devices differ. All else asks here."""

from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import psutil

CACHE_FRACTION: Final = 0.1
MIN_CACHE_NBYTES: Final = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes that MLX holds: ``active_nbytes`` in arrays, ``cached_nbytes`` free for reuse."""

    active_nbytes: int
    cached_nbytes: int


def describe() -> str:
    """Name the device for people."""
    info = _info()
    kind = "Metal" if mx.metal.is_available() else _kind()
    name = info.get("device_name") or info.get("architecture")
    return f"{kind} ({name})" if name else kind


def limit_memory(share_nbytes: int | None) -> None:
    """Keep the allocator within this worker's share, as far as MLX's guidelines reach.

    Allocations beyond the limit still succeed, so that admission must govern; what the limit does
    is to give cached buffers back. None leaves MLX's defaults.
    """
    if share_nbytes is None:
        return
    mx.set_memory_limit(share_nbytes)
    mx.set_cache_limit(max(MIN_CACHE_NBYTES, int(share_nbytes * CACHE_FRACTION)))


def wire_weights(weights_nbytes: int) -> None:
    """Wire no more than this worker's own weights.

    Several processes that each wire the recommended maximum hang or panic the machine (mlx #3186,
    mlx-lm PR #1252).
    """
    if not mx.metal.is_available():
        return
    recommended = int(_info().get("max_recommended_working_set_size", 0))
    mx.set_wired_limit(min(weights_nbytes, recommended))


def memory() -> DeviceMemory:
    return DeviceMemory(active_nbytes=mx.get_active_memory(), cached_nbytes=mx.get_cache_memory())


def total_nbytes() -> int:
    """Memory that models may be planned into: the recommended working set, or all RAM."""
    info = _info()
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if info.get(key):
            return int(info[key])
    return int(psutil.virtual_memory().total)


def _kind() -> str:
    cuda = getattr(mx, "cuda", None)
    return "CUDA" if cuda is not None and cuda.is_available() else "CPU"


def _info() -> dict[str, Any]:
    info: dict[str, Any] = mx.device_info()
    return info
