"""The limit on open files that mlx-lm needs."""

import resource
from typing import Final

from mlx_dp.proto.errors import ConfigError

MLX_LM_LIMIT: Final = 4096
"""mlx-lm sets this limit in each process that imports it; only root may raise the hard limit."""


def check_descriptor_limit() -> None:
    """Raise ConfigError in a process that could not import mlx-lm."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= MLX_LM_LIMIT:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, MLX_LM_LIMIT))
    except (ValueError, OSError):
        raise ConfigError(
            f"the hard limit on open files is {hard}, and mlx-lm needs {MLX_LM_LIMIT}: start from "
            f"a shell where `ulimit -Hn` says at least {MLX_LM_LIMIT}, or under launchd set "
            "NumberOfFiles in the plist's HardResourceLimits and SoftResourceLimits"
        ) from None
