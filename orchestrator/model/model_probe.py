"""Measures a model and its device in a child, since the controller never loads MLX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from mlx_dp.orchestrator.model.child_output import run_child
from mlx_dp.proto.capacity.model_shape import ModelShape, RankWeights
from mlx_dp.proto.errors import ConfigError

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device that MLX computes on. ``working_set_nbytes``: the limit that Metal recommends."""

    kind: Literal["cpu", "metal", "cuda"]
    name: str
    memory_nbytes: int
    working_set_nbytes: int
    backends: tuple[str, ...] = ("ring",)
    """Distributed backends built into MLX here, by MLX's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProbe:
    """The sizes of a model and its device. ``rank_weights``: of the requested ranks.

    ``float32``: it computes in float32. ``unbatchable``: why no batch can hold its caches.
    """

    shape: ModelShape
    device: DeviceFacts
    float32: bool = False
    unbatchable: str | None = None
    rank_weights: RankWeights | None = None


def probe_model(
    path: Path,
    *,
    ranks: int | None = None,
    vocabulary: bool = False,
    trust_remote_code: bool = False,
    timeout_s: float = _TIMEOUT_S,
) -> ModelProbe:
    """Build the model's graph in a child, without its weights, and return its sizes.

    ``ranks``: the size of a group that would divide the weights, including embedding and LM head
    with ``vocabulary``. ``trust_remote_code``: run Python code that comes with the model.
    """
    answers: list[dict[str, Any]] = []
    divided = [] if ranks is None else ["--ranks", str(ranks)]
    divided += ["--vocabulary"] if vocabulary else []
    trusted = ["--trust-remote-code"] if trust_remote_code else []
    run_child(["probe", str(path), *divided, *trusted], answers.append, timeout_s=timeout_s)
    if len(answers) != 1:
        raise ConfigError(f"the probe of {path} gave {len(answers)} answers instead of one")
    return msgspec.convert(answers[0], ModelProbe)
