"""The environment that each worker process gets."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_dp.orchestrator.process.blas import choose_blas, find_openblas, usable_cores
from mlx_dp.orchestrator.process.cuda_devices import device_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """What all workers share, and the devices that they take in turn."""

    common: Mapping[str, str]
    cuda_devices: tuple[str, ...] = ()
    warning: str | None = None

    def of(self, index: int) -> dict[str, str]:
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
    """Start from ours. ``device`` is the kind that MLX computes on, None for the fake engine.

    ``float32``: the model computes in float32.
    """
    # A worker that crashes must not take its last lines with it.
    common = {**environment, "PYTHONUNBUFFERED": "1"}
    if float32 and platform == "darwin":
        # From M5 on, products of several rows would be rounded to TF32 and those of one row not,
        # so that an answer would depend on what else is in the batch.
        common.setdefault("MLX_ENABLE_TF32", "0")
    if not (device == "cpu" and platform == "linux"):
        return WorkerEnvironment(common=common, cuda_devices=cuda_devices)
    blas = choose_blas(environment, library=find_openblas(), cores=usable_cores(), workers=workers)
    return WorkerEnvironment(common={**common, **blas.variables}, warning=blas.warning)
