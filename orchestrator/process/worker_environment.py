"""The environment of worker processes: devices, and a fast matrix library on a Linux CPU."""

import ctypes.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mlx_dp.orchestrator.process.cuda_devices import device_variables

_LIBRARY: Final = "libopenblas.so.0"
_FOLDERS: Final = tuple(
    Path(folder)
    for folder in (
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    )
)
_MISSING: Final = (
    "OpenBLAS was not found, without which MLX is about 25 times slower in float32 on a CPU: "
    "install it (Debian: libopenblas0-pthread, Fedora: openblas)"
)


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
        return BlasChoice(warning=_MISSING)
    variables: dict[str, str] = {}
    if library is not None and not chosen:
        variables["LD_PRELOAD"] = f"{preloaded}:{library}" if preloaded else library
    if "OPENBLAS_NUM_THREADS" not in environment:
        variables["OPENBLAS_NUM_THREADS"] = str(max(1, cores // workers))
    return BlasChoice(variables=variables)


def find_openblas(folders: tuple[Path, ...] = _FOLDERS) -> str | None:
    """The name or path to preload, or None."""
    # ldconfig first; slim images have none, so the usual folders follow.
    if ctypes.util.find_library("openblas") == _LIBRARY:
        return _LIBRARY
    for folder in folders:
        for path in (folder / _LIBRARY, folder / "openblas-pthread" / _LIBRARY):
            if path.is_file():
                return str(path)
    return None


def usable_cores() -> int:
    """The number of cores that this process may use, maybe fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
