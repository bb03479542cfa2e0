"""The meaning of a worker's exit status, for when its last message was lost or never sent.

Imports no module of ours: the parent watch needs it before anything else is loaded.
"""

from enum import IntEnum, unique


@unique
class ExitCode(IntEnum):
    """The status of a worker that ended by itself. A negative status is the signal that killed it.

    Each ``FailureKind`` has a member of its name.
    """

    OK = 0
    """``Shutdown`` was received. Without one, this exit counts as a crash."""
    CRASH = 1
    """The interpreter failed, for example on an import."""
    USAGE = 2
    """The command line was wrong; argparse chose this number."""
    CONFIG = 3
    INTERNAL = 4
    PARENT_GONE = 5
    UNSUPPORTED_MODEL = 6
    OUT_OF_MEMORY = 7
    HOST_LOST = 9
    """No process exits with this: the connection to its machine is lost."""
    PEER_LOST = 8

    @property
    def would_fail_again(self) -> bool:
        """Whether a restart with the same configuration cannot help."""
        return self in (
            ExitCode.USAGE,
            ExitCode.CONFIG,
            ExitCode.UNSUPPORTED_MODEL,
            ExitCode.OUT_OF_MEMORY,
        )
