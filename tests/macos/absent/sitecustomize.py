"""Imitates macOS before any other import: removes what it lacks, and adds what it has instead.

Python imports this module by its name at each start, where its folder is on ``PYTHONPATH``: that
reaches every process that a test starts. ``sys.platform`` stays, since libraries ask it as well.
"""

import _socket
import errno
import fcntl
import os
import posix
import select
import sys
from collections.abc import Sequence
from typing import Any, Final

# Python 3.13 has waitid on macOS; older ones do not.
_OF_POSIX: Final = ("pidfd_open", "waitid", "eventfd", "memfd_create", "pipe2")
_OF_SELECT: Final = ("epoll",)
_OF_FCNTL: Final = ("F_SETSIG", "F_GETSIG")
_OF_SOCKET: Final = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "SOCK_CLOEXEC", "SOCK_NONBLOCK")

_pidfd_open: Final = os.pidfd_open
_epoll: Final = select.epoll
_keep_idle: Final = _socket.TCP_KEEPIDLE


class KernelEvent:
    """``select.kevent``, as far as processes are concerned."""

    def __init__(self, ident: int, filter: int = 0, flags: int = 0, fflags: int = 0) -> None:
        self.ident = ident
        self.filter = filter
        self.flags = flags
        self.fflags = fflags


class KernelQueue:
    """``select.kqueue`` for exits of processes: a process that is a zombie already is not found."""

    def __init__(self) -> None:
        self._poll = _epoll()
        self._events: dict[int, KernelEvent] = {}

    def control(
        self, changes: Sequence[KernelEvent] | None, most: int, timeout: float | None = None
    ) -> list[KernelEvent]:
        for event in changes or ():
            self._add(event)
        if most == 0:
            return []
        ready = self._poll.poll(-1 if timeout is None else timeout, most)
        return [self._take(descriptor) for descriptor, _ in ready]

    def _add(self, event: KernelEvent) -> None:
        assert event.filter == KQ_FILTER_PROC, "only exits of processes are imitated"
        assert event.fflags == KQ_NOTE_EXIT, "only exits of processes are imitated"
        # Raises ProcessLookupError, as kqueue does.
        descriptor = _pidfd_open(event.ident)
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if poller.poll(0):
            os.close(descriptor)
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        self._events[descriptor] = event
        self._poll.register(descriptor, select.POLLIN)

    def _take(self, descriptor: int) -> KernelEvent:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        return self._events.pop(descriptor)

    def close(self) -> None:
        for descriptor in self._events:
            os.close(descriptor)
        self._events.clear()
        self._poll.close()


# The values of macOS.
KQ_FILTER_PROC: Final = -5
KQ_EV_ADD: Final = 0x1
KQ_EV_ENABLE: Final = 0x4
KQ_EV_ONESHOT: Final = 0x10
KQ_NOTE_EXIT: Final = 0x80000000


def _take_away(module: Any, names: Sequence[str]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _refuse_proc(event: str, arguments: tuple[Any, ...]) -> None:
    """Let only psutil read ``/proc``: on macOS it asks the system by other means."""
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    path = arguments[0]
    if not isinstance(path, str) or not path.startswith("/proc/"):
        return
    frame = sys._getframe(1)
    while frame is not None:
        if "psutil" in frame.f_code.co_filename:
            return
        frame = frame.f_back
    raise FileNotFoundError(errno.ENOENT, "macOS has no /proc", path)


def _become() -> None:
    for module in (os, posix):
        _take_away(module, _OF_POSIX)
    _take_away(select, _OF_SELECT)
    _take_away(fcntl, _OF_FCNTL)
    # socket imports it, and is not yet imported itself.
    _take_away(_socket, _OF_SOCKET)
    system: Any = _socket
    system.TCP_KEEPALIVE = _keep_idle
    # asyncio on macOS uses kqueue for sockets too, which is not imitated: it gets poll().
    import selectors

    assert selectors.DefaultSelector is selectors.PollSelector
    imitated: Any = select
    imitated.kqueue, imitated.kevent = KernelQueue, KernelEvent
    for name in ("KQ_FILTER_PROC", "KQ_EV_ADD", "KQ_EV_ENABLE", "KQ_EV_ONESHOT", "KQ_NOTE_EXIT"):
        setattr(imitated, name, globals()[name])
    sys.addaudithook(_refuse_proc)


if "socket" in sys.modules or "selectors" in sys.modules:
    raise ImportError("macOS has to be imitated before socket and selectors are imported")
_become()
