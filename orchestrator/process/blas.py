"""A fast matrix library for workers on a Linux CPU, where MLX's own is slow in float32."""

import ctypes.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

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
class BlasChoice:
    """Variables to add to the workers' environment, and a sentence when something is missing."""

    variables: Mapping[str, str] = field(default_factory=dict)
    warning: str | None = None


def choose_blas(
    environment: Mapping[str, str], *, library: str | None, cores: int, workers: int
) -> BlasChoice:
    """Preload OpenBLAS with an even share of the cores; what the user already set stays."""
    preloaded = environment.get("LD_PRELOAD", "")
    # Any BLAS that the user preloads is a choice; two of them would fight.
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
    """The name or path to preload, or None where there is none."""
    # Asks ldconfig first; a slim image has none, so that the usual folders follow.
    if ctypes.util.find_library("openblas") == _LIBRARY:
        return _LIBRARY
    for folder in folders:
        for path in (folder / _LIBRARY, folder / "openblas-pthread" / _LIBRARY):
            if path.is_file():
                return str(path)
    return None


def usable_cores() -> int:
    """The cores that this process may run on, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
