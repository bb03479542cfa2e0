"""Prepares the model before anything starts: fetch, convert, and measure it and the device."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from mlx_dp.orchestrator.config import configuration
from mlx_dp.orchestrator.config.flags import Flags, ModelFlags, OwnerFlags
from mlx_dp.orchestrator.config.memory_share import SharedMemory, ram_nbytes, shared_memory
from mlx_dp.orchestrator.model.model_probe import DeviceFacts, probe_model
from mlx_dp.orchestrator.model.model_source import ResolvedModel, host_device, resolve_model
from mlx_dp.orchestrator.model.progress import terminal_progress
from mlx_dp.orchestrator.process.worker_environment import cuda_devices
from mlx_dp.proto.capacity.model_shape import ModelShape, RankWeights
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.descriptor_limit import check_descriptor_limit
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.commands import EngineKind

FAKE_MODEL_NAME: Final = "fake"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A local model, and the device that it will run on.

    For the fake engine everything but the names is empty.
    """

    served_name: str
    """The name in responses, and the first name that clients may request."""
    served_aliases: tuple[str, ...] = ()
    own_names: tuple[str, ...] = ()
    """The model's own names: hub id or folder, and path."""
    path: Path | None = None
    shape: ModelShape | None = None
    rank_weights: RankWeights | None = None
    """The weights of each rank, if a group divides them."""
    device: DeviceFacts | None = None
    memory: SharedMemory | None = None
    cuda_devices: tuple[str, ...] = ()
    float32: bool = False
    """It computes in float32."""
    unbatchable: str | None = None
    """Why no batch can hold its caches. Other models are checked at load."""


def prepare_model(flags: Flags, environment: Mapping[str, str]) -> PreparedModel:
    """Fetch and convert the model if needed, and measure it in a child process."""
    if flags.model.engine is EngineKind.FAKE:
        names = _served_names(flags.model, FAKE_MODEL_NAME)
        return PreparedModel(
            served_name=names[0], served_aliases=names[1:], own_names=(FAKE_MODEL_NAME,)
        )
    # Checked first: children inherit the limit, and would fail only once the model is fetched.
    check_descriptor_limit()
    model = _resolve(flags.model)
    probe = probe_model(
        model.path,
        ranks=_ranks(flags.owners),
        vocabulary=flags.owners.enable_dp_lm_head,
        trust_remote_code=flags.model.trust_remote_code,
    )
    devices = cuda_devices(environment) if probe.device.kind == "cuda" else ()
    names = _served_names(flags.model, model.served_name)
    return PreparedModel(
        served_name=names[0],
        served_aliases=names[1:],
        own_names=_own_names(flags.model, model),
        path=model.path,
        shape=probe.shape,
        rank_weights=probe.rank_weights,
        device=probe.device,
        memory=shared_memory(
            probe.device, ram_nbytes=ram_nbytes(), cuda_devices=max(1, len(devices))
        ),
        cuda_devices=devices,
        float32=probe.float32,
        unbatchable=probe.unbatchable,
    )


def _served_names(flags: ModelFlags, own: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(flags.served_model_name or [own]))


def _own_names(flags: ModelFlags, model: ResolvedModel) -> tuple[str, ...]:
    """The hub id, folder or file name, and the path as given and in full."""
    given = () if flags.model is None else (flags.model,)
    paths = (str(model.path), str(model.path.resolve()))
    return tuple(dict.fromkeys((model.served_name, *given, *paths)))


def _ranks(flags: OwnerFlags) -> int | None:
    topology = configuration.topology(flags)
    return topology.tp_size if topology.mode is ReplicaMode.DP_ATTENTION else None


def _resolve(flags: ModelFlags) -> ResolvedModel:
    cache_dir = Path(platformdirs.user_cache_dir("mlx-dp"))
    try:
        with terminal_progress(sys.stderr) as progress:
            return resolve_model(
                flags.model,
                revision=flags.revision,
                cache_dir=cache_dir,
                progress=progress,
                device=host_device(),
                trust_remote_code=flags.trust_remote_code,
            )
    except OSError as error:
        raise ConfigError(
            f"the model cannot be prepared: {error}. Its files must be readable, and the cache "
            f"{cache_dir} writable, with room for a converted model"
        ) from error
