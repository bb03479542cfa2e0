"""A child's exit, seen at once in the event loop, and the end of its process group."""

import asyncio
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Final

_RETRY_S: Final = 0.05


def watch_exit(child: subprocess.Popen[bytes], on_exit: Callable[[], None]) -> None:
    """Call ``on_exit`` in the running loop once the child has ended.

    The caller reaps it: until then no other process can get its pid, which also names its group.
    """
    loop = asyncio.get_running_loop()
    descriptor = _open_pidfd(child.pid)
    if descriptor is None:
        _watch_by_thread(child.pid, on_exit, loop)
        return

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        on_exit()

    loop.add_reader(descriptor, ended)


def _open_pidfd(pid: int) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        # Older kernels, sandboxes that forbid the call, and no descriptors left.
        return None


def _watch_by_thread(
    pid: int, on_exit: Callable[[], None], loop: asyncio.AbstractEventLoop
) -> None:
    def wait() -> None:
        if hasattr(os, "waitid"):
            _wait_by_waitid(pid)
        else:
            # On macOS Python has waitid only since 3.13.
            _wait_by_kqueue(pid)
        # A closed loop has no callback to run.
        if not loop.is_closed():
            loop.call_soon_threadsafe(on_exit)

    threading.Thread(target=wait, name=f"wait-{pid}", daemon=True).start()


def _wait_by_waitid(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        # Its owner has already reaped it.
        return


def _wait_by_kqueue(pid: int) -> None:
    # The type stubs for Linux lack it.
    system: Any = select
    event = system.kevent(
        pid,
        filter=system.KQ_FILTER_PROC,
        flags=system.KQ_EV_ADD | system.KQ_EV_ONESHOT,
        fflags=system.KQ_NOTE_EXIT,
    )
    while True:
        try:
            queue = system.kqueue()
        except OSError:
            # No descriptors left: the service closes some soon.
            time.sleep(_RETRY_S)
            continue
        try:
            queue.control([event], 1)
        except ProcessLookupError:
            # It had already ended; only a zombie is left.
            pass
        finally:
            queue.close()
        return


_logger = logging.getLogger(__name__)


def kill_group(leader: int) -> None:
    """Send SIGKILL to a process group. Call it before the leader is reaped and its pid reused.

    A group that has already ended is not an error.
    """
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # Already gone; macOS reports EPERM when only a zombie is left.
        _logger.debug("pid %d: its group has ended", leader)
