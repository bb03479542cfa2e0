"""The environment that each worker process gets."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_dp.orchestrator.preparation import PreparedModel
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
    environment: Mapping[str, str], model: PreparedModel, *, workers: int
) -> WorkerEnvironment:
    """Start from ours."""
    # A worker that crashes must not take its last lines with it.
    common = {**environment, "PYTHONUNBUFFERED": "1"}
    on_cpu = model.device is not None and model.device.kind == "cpu"
    if not (on_cpu and sys.platform == "linux"):
        return WorkerEnvironment(common=common, cuda_devices=model.cuda_devices)
    blas = choose_blas(environment, library=find_openblas(), cores=usable_cores(), workers=workers)
    return WorkerEnvironment(common={**common, **blas.variables}, warning=blas.warning)
