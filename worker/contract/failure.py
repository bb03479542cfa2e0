"""Maps exceptions to the failure that a worker reports to the controller."""

import re
from typing import Final

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.fields import clip_text
from mlx_dp.proto.messages.events import Failed, FailureKind
from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.contract.peers import PassEndedError, RankLostError

# MLX raises RuntimeError for a failed allocation, with another text on each device.
_ALLOCATION: Final = re.compile(
    r"malloc|alloc.*\b(bytes|buffer)\b|out of memory|insufficient memory|resource limit",
    re.IGNORECASE,
)
# MLX's backends report a lost peer with their own name in front.
_CONNECTION: Final = re.compile(r"^\[(ring|jaccl|nccl|mpi)\]", re.IGNORECASE)


def kind_of(error: Exception) -> FailureKind:
    """Classify an error during start-up."""
    match error:
        case ConfigError():
            return FailureKind.CONFIG
        case UnsupportedModelError():
            return FailureKind.UNSUPPORTED_MODEL
        case ImportError():
            # A restart does not install a missing or incompatible package.
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


def is_model_fault(error: Exception) -> bool:
    """Whether a model file raised this error for its input, as far as can be told.

    Any other error ends the process.
    """
    if isinstance(error, PassEndedError):
        return False
    if isinstance(error, ImportError):
        return True
    return kind_of(error) in (FailureKind.INTERNAL, FailureKind.UNSUPPORTED_MODEL)


def starting_failure(error: Exception) -> Failed:
    """Return the event of a worker that cannot start."""
    return _failed(kind_of(error), error)


def serving_failure(error: Exception) -> Failed:
    """Return the event of a worker that cannot continue. It did start, so a restart may help."""
    kind = kind_of(error)
    return _failed(kind if kind.transient else FailureKind.INTERNAL, error)


def _failed(kind: FailureKind, error: Exception) -> Failed:
    lost_rank = error.rank if isinstance(error, RankLostError) else None
    return Failed(kind=kind, message=sentence(error), lost_rank=lost_rank)


def sentence(error: Exception) -> str:
    """Return the text of an error, with its class name unless it is one of our own."""
    text = str(error)
    if not isinstance(error, ConfigError | UnsupportedModelError | RankLostError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return clip_text(text)
