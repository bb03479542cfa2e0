"""Notice the end of a child at once, in the event loop."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Callable


def watch_exit(child: subprocess.Popen[bytes], on_exit: Callable[[], None]) -> None:
    """Call ``on_exit`` in the running loop once the child has ended. It may not be reaped yet."""
    loop = asyncio.get_running_loop()
    descriptor = _open_pidfd(child.pid)
    if descriptor is None:
        _watch_by_thread(child, on_exit, loop)
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
        # Older kernels, and sandboxes that forbid the call.
        return None


def _watch_by_thread(
    child: subprocess.Popen[bytes], on_exit: Callable[[], None], loop: asyncio.AbstractEventLoop
) -> None:
    def wait() -> None:
        child.wait()
        # A loop that is closed has nobody left who wants to know.
        if not loop.is_closed():
            loop.call_soon_threadsafe(on_exit)

    threading.Thread(target=wait, name=f"wait-{child.pid}", daemon=True).start()
