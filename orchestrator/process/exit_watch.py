"""Notice the end of a child at once, in the event loop, and leave it to be reaped."""

import asyncio
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Final

_RETRY_S: Final = 0.05


def watch_exit(child: subprocess.Popen[bytes], on_exit: Callable[[], None]) -> None:
    """Call ``on_exit`` in the running loop once the child has ended.

    It is not reaped here: until then nobody else can get its pid, which names its group too.
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
        # A loop that is closed has nobody left who wants to know.
        if not loop.is_closed():
            loop.call_soon_threadsafe(on_exit)

    threading.Thread(target=wait, name=f"wait-{pid}", daemon=True).start()


def _wait_by_waitid(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        # Whoever wanted its end did not wait for us, and has reaped it.
        return


def _wait_by_kqueue(pid: int) -> None:
    # Linux' type stubs do not know it.
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
            # No descriptors left: the service closes some sooner or later.
            time.sleep(_RETRY_S)
            continue
        try:
            queue.control([event], 1)
        except ProcessLookupError:
            # It had ended before; only a zombie is left.
            pass
        finally:
            queue.close()
        return
