"""Divides one device's memory among the workers that compute on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from mlx_dp.orchestrator.model.model_probe import DeviceFacts
from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.capacity.token_pool import MIN_POOL_TOKENS, overhead_nbytes
from mlx_dp.proto.errors import ConfigError

_LIMIT_FILES: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The memory of one device, of which the fraction is taken, and the number of such devices."""

    nbytes: int
    devices: int
    description: str

    def share_nbytes(self, workers: int, fraction: float) -> int:
        """The share of each of ``workers``. With more workers than devices, several share one."""
        per_device = -(-workers // self.devices)
        return int(self.nbytes * fraction) // per_device


def shared_memory(device: DeviceFacts, *, ram_nbytes: int, cuda_devices: int = 1) -> SharedMemory:
    """The memory to divide. On a CPU it is half of the RAM, since the user works there too."""
    match device.kind:
        case "cpu":
            return SharedMemory(nbytes=ram_nbytes // 2, devices=1, description="half of the RAM")
        case "metal":
            return SharedMemory(
                nbytes=device.working_set_nbytes,
                devices=1,
                description="the working set that Metal recommends",
            )
        case "cuda":
            return SharedMemory(
                nbytes=device.memory_nbytes,
                devices=max(1, cuda_devices),
                description="the memory of one CUDA device",
            )


def share_memory(
    memory: SharedMemory, shape: ModelShape, *, workers: int, fraction: float, divided: bool = False
) -> int:
    """Return one worker's bytes. Raises ConfigError with the sum when its weights do not fit.

    ``divided``: the workers form a group, and ``shape`` is that of its largest rank.
    """
    share = memory.share_nbytes(workers, fraction)
    if _fits(share, shape):
        return share
    fewer = next(
        (n for n in range(workers - 1, 0, -1) if _fits(memory.share_nbytes(n, fraction), shape)),
        None,
    )
    model = "a smaller or more quantised model"
    if divided:
        # With fewer ranks each would hold more.
        larger = _fits(memory.share_nbytes(workers, 1.0), shape)
        advice = f"use a larger --mem-fraction-static, or {model}" if larger else f"use {model}"
    elif fewer is not None:
        advice = f"use --dp-size {fewer}, a larger --mem-fraction-static, or {model}"
    elif _fits(memory.share_nbytes(1, 1.0), shape):
        advice = f"not even one worker fits, so use a larger --mem-fraction-static or {model}"
    else:
        advice = f"not even one worker fits, so use {model}"
    per_device = -(-workers // memory.devices)
    count = "1 worker" if per_device == 1 else f"{per_device} workers"
    raise ConfigError(
        f"{count} x ({_gb(shape.weights_nbytes)} of weights + {_gb(overhead_nbytes(share))} for "
        f"activations) exceed {_gb(int(memory.nbytes * fraction))} (--mem-fraction-static "
        f"{fraction:g} of {_gb(memory.nbytes)}, {memory.description}): {advice}"
    )


def _fits(share_nbytes: int, shape: ModelShape) -> bool:
    least = shape.request_nbytes(MIN_POOL_TOKENS)
    return shape.weights_nbytes + overhead_nbytes(share_nbytes) + least <= share_nbytes


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def ram_nbytes(limit_files: tuple[Path, ...] = _LIMIT_FILES) -> int:
    """Bytes of RAM that this process may use: the machine's, or the control group's limit."""
    total = int(psutil.virtual_memory().total)
    return min([total, *_limits(limit_files)])


def _limits(files: tuple[Path, ...]) -> list[int]:
    texts = [file.read_text("ascii").strip() for file in files if file.is_file()]
    # "max" means no limit; cgroup v1 writes an absurdly large number instead.
    return [int(text) for text in texts if text.isdigit() and int(text) > 0]
