"""Exit statuses of worker processes, in words and as kinds of failure."""

import signal

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.events import FailureKind


def describe_exit(status: int, *, expected: bool = False) -> str:
    """Describe how a process ended; a negative status is the signal that killed it.

    ``expected``: the worker was given up before, so a signal may be the controller's.
    """
    if status >= 0:
        try:
            return f"exited with status {status} ({ExitCode(status).name.lower()})"
        except ValueError:
            return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ", possibly out of memory" if status == -signal.SIGKILL and not expected else ""
    return f"killed by {name}{hint}"


def failure_of(status: int) -> FailureKind:
    """Return the kind of failure that an exit status means, if no ``Failed`` has arrived."""
    match status:
        case ExitCode.CONFIG | ExitCode.USAGE:
            return FailureKind.CONFIG
        case ExitCode.UNSUPPORTED_MODEL:
            return FailureKind.UNSUPPORTED_MODEL
        case ExitCode.OUT_OF_MEMORY:
            return FailureKind.OUT_OF_MEMORY
        case ExitCode.PEER_LOST:
            return FailureKind.PEER_LOST
        case _:
            return FailureKind.INTERNAL
