"""The environment of worker processes: CUDA devices, and a fast matrix library on a Linux CPU."""

import ctypes.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_OPENBLAS: Final = "libopenblas.so.0"
_LIBRARY_FOLDERS: Final = tuple(
    Path(folder)
    for folder in (
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    )
)
_OPENBLAS_MISSING: Final = (
    "OpenBLAS was not found, without which MLX is about 25 times slower in float32 on a CPU: "
    "install it (Debian: libopenblas0-pthread, Fedora: openblas)"
)
_CUDA_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_LISTING_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """Variables that all workers share, and the devices assigned to them in turn."""

    common: Mapping[str, str]
    cuda_devices: tuple[str, ...] = ()
    warning: str | None = None

    def for_worker(self, index: int) -> dict[str, str]:
        """The whole environment of worker ``index``."""
        return {**self.common, **device_variables(self.cuda_devices, index)}


def worker_environment(
    environment: Mapping[str, str],
    *,
    device: str | None,
    cuda_devices: tuple[str, ...],
    workers: int,
    float32: bool = False,
    platform: str = sys.platform,
) -> WorkerEnvironment:
    """Derive the environment from ours.

    ``device`` is the kind that MLX computes on, None for the fake engine. ``float32``: the model
    computes in float32.
    """
    # Unbuffered, so that a crash does not lose the last lines.
    common = {**environment, "PYTHONUNBUFFERED": "1"}
    if float32 and platform == "darwin":
        # From M5 on, MLX rounds products of several rows to TF32 but not those of one row, so
        # output would depend on the rest of the batch.
        common.setdefault("MLX_ENABLE_TF32", "0")
    if not (device == "cpu" and platform == "linux"):
        return WorkerEnvironment(common=common, cuda_devices=cuda_devices)
    blas = choose_blas(environment, library=find_openblas(), cores=usable_cores(), workers=workers)
    return WorkerEnvironment(common={**common, **blas.variables}, warning=blas.warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasChoice:
    """Variables for the workers' environment, and a warning when the library is missing."""

    variables: Mapping[str, str] = field(default_factory=dict)
    warning: str | None = None


def choose_blas(
    environment: Mapping[str, str], *, library: str | None, cores: int, workers: int
) -> BlasChoice:
    """Preload OpenBLAS with an even share of the cores. Variables that the user set stay."""
    preloaded = environment.get("LD_PRELOAD", "")
    # A BLAS that the user preloads wins; two would conflict.
    chosen = any(name in preloaded.lower() for name in ("blas", "mkl"))
    if library is None and not chosen:
        return BlasChoice(warning=_OPENBLAS_MISSING)
    variables: dict[str, str] = {}
    if library is not None and not chosen:
        variables["LD_PRELOAD"] = f"{preloaded}:{library}" if preloaded else library
    if "OPENBLAS_NUM_THREADS" not in environment:
        variables["OPENBLAS_NUM_THREADS"] = str(max(1, cores // workers))
    return BlasChoice(variables=variables)


def find_openblas(folders: tuple[Path, ...] = _LIBRARY_FOLDERS) -> str | None:
    """The name or path to preload, or None."""
    # ldconfig first; slim images have none, so the usual folders follow.
    if ctypes.util.find_library("openblas") == _OPENBLAS:
        return _OPENBLAS
    for folder in folders:
        for path in (folder / _OPENBLAS, folder / "openblas-pthread" / _OPENBLAS):
            if path.is_file():
                return str(path)
    return None


def usable_cores() -> int:
    """The number of cores that this process may use, maybe fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cuda_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of usable devices, in the form of CUDA_VISIBLE_DEVICES; () without CUDA.

    The device library is not needed to find them.
    """
    given = environment.get(_CUDA_DEVICES)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    command = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if command is None:
        return ()
    try:
        listing = subprocess.run(
            [command, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_LISTING_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if listing.returncode != 0:
        return ()
    return tuple(line.strip() for line in listing.stdout.splitlines() if line.strip())


def device_variables(devices: tuple[str, ...], index: int) -> dict[str, str]:
    """Assign one device to each worker, round robin; {} without devices."""
    if not devices:
        return {}
    return {_CUDA_DEVICES: devices[index % len(devices)]}
