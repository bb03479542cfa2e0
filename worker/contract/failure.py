"""Why a worker gives up, as the controller is told."""

import re
from typing import Final

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.fields import clip_text
from mlx_dp.proto.messages.protocol import Failed, FailureKind
from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.contract.peers import PassEndedError, RankLostError

# MLX raises RuntimeError for a failed allocation, with another text on each device.
_ALLOCATION: Final = re.compile(
    r"malloc|alloc.*\b(bytes|buffer)\b|out of memory|insufficient memory|resource limit",
    re.IGNORECASE,
)
# Words of MLX's backends when a peer is gone; each names itself.
_CONNECTION: Final = re.compile(r"^\[(ring|jaccl|nccl|mpi)\]", re.IGNORECASE)


def kind_of(error: Exception) -> FailureKind:
    """Return the kind of failure that an error during start-up is."""
    match error:
        case ConfigError():
            return FailureKind.CONFIG
        case UnsupportedModelError():
            return FailureKind.UNSUPPORTED_MODEL
        case ImportError():
            # A restart installs nothing that is missing or does not fit together.
            return FailureKind.CONFIG
        case RankLostError():
            return FailureKind.PEER_LOST
        case RuntimeError() if _CONNECTION.search(str(error)):
            return FailureKind.PEER_LOST
        case MemoryError():
            return FailureKind.OUT_OF_MEMORY
        case RuntimeError() if _ALLOCATION.search(str(error)):
            return FailureKind.OUT_OF_MEMORY
        case _:
            return FailureKind.INTERNAL


def says_of_model(error: Exception) -> bool:
    """A model file raised it for what it was given, as far as one can tell.

    Any other error ends the process, whatever was tried with the model.
    """
    if isinstance(error, PassEndedError):
        return False
    if isinstance(error, ImportError):
        return True
    return kind_of(error) in (FailureKind.INTERNAL, FailureKind.UNSUPPORTED_MODEL)


def starting_failure(error: Exception) -> Failed:
    """The event of a worker that cannot start."""
    return _failed(kind_of(error), error)


def serving_failure(error: Exception) -> Failed:
    """The event of a worker that cannot go on. It could before, so a restart may help."""
    kind = kind_of(error)
    return _failed(kind if kind.transient else FailureKind.INTERNAL, error)


def _failed(kind: FailureKind, error: Exception) -> Failed:
    lost_rank = error.rank if isinstance(error, RankLostError) else None
    return Failed(kind=kind, message=sentence(error), lost_rank=lost_rank)


def sentence(error: Exception) -> str:
    """The error as a message takes it. Only our own errors speak for themselves."""
    text = str(error)
    if not isinstance(error, ConfigError | UnsupportedModelError | RankLostError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return clip_text(text)
