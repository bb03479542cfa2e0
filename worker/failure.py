"""Why a worker gives up, as the controller is told."""

import re
from typing import Final

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.fields import clip_text
from mlx_dp.proto.messages import FailureKind
from mlx_dp.worker.engine import UnsupportedModelError

# MLX raises RuntimeError for a failed allocation, with another text on each device.
_ALLOCATION: Final = re.compile(
    r"malloc|alloc.*\b(bytes|buffer)\b|out of memory|insufficient memory|resource limit",
    re.IGNORECASE,
)


def kind_of(error: Exception) -> FailureKind:
    """Say what kind of failure an error during start-up is."""
    match error:
        case ConfigError():
            return FailureKind.CONFIG
        case UnsupportedModelError():
            return FailureKind.UNSUPPORTED_MODEL
        case MemoryError():
            return FailureKind.OUT_OF_MEMORY
        case RuntimeError() if _ALLOCATION.search(str(error)):
            return FailureKind.OUT_OF_MEMORY
        case _:
            return FailureKind.INTERNAL


def sentence(error: Exception) -> str:
    """The error as a message takes it. Only our own errors speak for themselves."""
    text = str(error)
    if not isinstance(error, ConfigError | UnsupportedModelError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return clip_text(text)
