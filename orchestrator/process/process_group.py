"""A child and all that it has started, which ends with it."""

import logging
import os
import signal

_logger = logging.getLogger(__name__)


def kill_group(leader: int) -> None:
    """SIGKILL to the group of this leader. Once that is reaped, its pid may be another's.

    A group that has ended is no error.
    """
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # It is gone already; macOS says EPERM when only a zombie is left.
        _logger.debug("pid %d: its group has ended", leader)
