"""The imitation of macOS works, in the test process and in its children."""

import asyncio
import os
import resource
import select
import selectors
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

ABSENT = Path(__file__).resolve().parent / "absent"
KQUEUE: Any = select

pytestmark = pytest.mark.skipif(
    str(ABSENT) not in sys.path, reason="runs inside the imitation: scripts/test --macos"
)


def exit_of(pid: int) -> Any:
    return KQUEUE.kevent(
        pid,
        filter=KQUEUE.KQ_FILTER_PROC,
        flags=KQUEUE.KQ_EV_ADD | KQUEUE.KQ_EV_ONESHOT,
        fflags=KQUEUE.KQ_NOTE_EXIT,
    )


def test_what_macos_lacks_is_gone_in_children_too() -> None:
    ask = (
        "import os, select, socket, selectors;"
        "print([hasattr(os, 'pidfd_open'), hasattr(os, 'waitid'), hasattr(select, 'epoll'),"
        "hasattr(socket, 'TCP_USER_TIMEOUT'), selectors.DefaultSelector.__name__])"
    )
    said = subprocess.check_output([sys.executable, "-c", ask], text=True)
    assert said == "[False, False, False, False, 'PollSelector']\n"
    assert not hasattr(os, "pidfd_open")
    assert selectors.DefaultSelector is selectors.PollSelector
    assert hasattr(socket, "TCP_KEEPALIVE")


def test_limits_are_those_of_a_shell_of_macos() -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256
    assert len(os.environ["TMPDIR"]) == 90


def test_psutil_alone_reads_proc() -> None:
    with pytest.raises(FileNotFoundError, match="macOS has no /proc"):
        Path("/proc/self/stat").read_text()
    assert psutil.Process().memory_info().rss > 0


def test_kqueue_reports_an_exit_once_and_finds_no_zombie() -> None:
    queue = KQUEUE.kqueue()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert queue.control([exit_of(child.pid)], 1, 0.0) == []
    assert child.stdin is not None
    child.stdin.close()
    (event,) = queue.control(None, 1, 200.0)
    assert event.ident == child.pid
    assert queue.control(None, 1, 0.0) == []
    with pytest.raises(ProcessLookupError):
        queue.control([exit_of(child.pid)], 0)
    child.wait()
    queue.close()


def test_asyncio_still_starts_and_awaits_children() -> None:
    async def status() -> int:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
        return await child.wait()

    assert asyncio.run(status()) == 7
