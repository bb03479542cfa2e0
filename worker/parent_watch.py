"""Ends this process as soon as its parent is gone, whatever the main thread is doing.

Loads no library: the watch must start before MLX is imported, which takes seconds.
"""

import fcntl
import os
import select
import signal
import threading
import time
from typing import Any, Final, NoReturn

from mlx_dp.proto.exit_codes import ExitCode

# The poll is the last resort; an orphan must end within 2 s.
POLL_INTERVAL_S: Final = 1.0


def watch_parent(parent_pid: int, death_fd: int) -> None:
    """Start every watch that the system offers, and return.

    ``death_fd`` is the read end of a pipe. The parent holds its only write end and never writes, so
    end of file means that the parent is gone. Raises OSError if it is not an open descriptor.
    """
    os.set_inheritable(death_fd, False)
    _exit_if_orphaned(parent_pid)
    _kill_at_end_of_file(death_fd)
    for target, argument in ((_watch_pipe, death_fd), (_watch_pid, parent_pid)):
        name = f"parent-{target.__name__.removeprefix('_watch_')}"
        threading.Thread(target=target, args=(argument,), name=name, daemon=True).start()


def _exit_if_orphaned(parent_pid: int) -> None:
    if os.getppid() != parent_pid:
        _exit()


def _exit() -> NoReturn:
    # No clean-up: the main thread may be inside an evaluation, which cannot be interrupted.
    os._exit(ExitCode.PARENT_GONE)


def _kill_at_end_of_file(death_fd: int) -> None:
    """Let the kernel kill us where it can: a thread has to wait while others hold the GIL."""
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(death_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(death_fd, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(death_fd, fcntl.F_GETFL)
    fcntl.fcntl(death_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    # The pipe may have ended before this was armed; the thread that reads it notices.


def _watch_pipe(death_fd: int) -> None:
    while os.read(death_fd, 1):
        pass
    _exit()


def _watch_pid(parent_pid: int) -> None:
    """Compare the parent's pid: when kqueue reports an exit, and at intervals everywhere."""
    queue = _exit_queue(parent_pid)
    while True:
        if queue is None:
            time.sleep(POLL_INTERVAL_S)
        elif queue.control(None, 1, POLL_INTERVAL_S):
            _exit()
        _exit_if_orphaned(parent_pid)


def _exit_queue(parent_pid: int) -> Any | None:
    """Return a kqueue that reports the parent's exit; None: the system has no kqueue."""
    # Linux' type stubs do not know it.
    system: Any = select
    if not hasattr(system, "kqueue"):
        return None
    queue = system.kqueue()
    event = system.kevent(
        parent_pid,
        filter=system.KQ_FILTER_PROC,
        flags=system.KQ_EV_ADD | system.KQ_EV_ONESHOT,
        fflags=system.KQ_NOTE_EXIT,
    )
    try:
        queue.control([event], 0)
    except ProcessLookupError:
        _exit()
    # The parent may have ended before this was registered, and its pid may be reused.
    _exit_if_orphaned(parent_pid)
    return queue
