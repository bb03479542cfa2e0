"""No child outlives a killed parent, in any state of the child."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.worker.parent_watch import watch_parent

pytestmark = pytest.mark.system

GONE_WITHIN_S = 200.0

# Starts children as the controller does, forwards the first one's output, and waits to be killed.
# The children inherit its standard output: that ends when all of them are gone.
PARENT = """
import os, subprocess, sys, time
for body in sys.argv[1:]:
    read_end, write_end = os.pipe()
    subprocess.Popen(
        [sys.executable, "-c", body, str(os.getpid()), str(read_end)], pass_fds=(read_end,)
    )
    os.close(read_end)
time.sleep(600)
"""
WATCH = """
import os, sys
from mlx_dp.worker.parent_watch import watch_parent
watch_parent(int(sys.argv[1]), int(sys.argv[2]))
os.write(1, b"watching\\n")  # in one piece, since siblings share the pipe
"""
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def family() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a parent with these children, and return once all of them watch it."""
    with ExitStack() as stack:

        def start(*bodies: str) -> subprocess.Popen[bytes]:
            parent = subprocess.Popen(
                [sys.executable, "-c", PARENT, *(WATCH + body for body in bodies)],
                stdout=subprocess.PIPE,
                bufsize=0,
            )
            stack.enter_context(parent)
            stack.callback(parent.kill)
            for _ in bodies:
                assert parent.stdout is not None
                assert parent.stdout.readline() == b"watching\n"
            return parent

        yield start


def assert_all_gone(parent: subprocess.Popen[bytes], within_s: float = GONE_WITHIN_S) -> None:
    """Wait for the end of the output that all of them hold open."""
    assert parent.stdout is not None
    deadline = time.monotonic() + within_s
    while (left_s := deadline - time.monotonic()) > 0.0:
        if select.select([parent.stdout], [], [], left_s)[0] and not parent.stdout.read(4096):
            return
    pytest.fail(f"a child outlived its parent by {within_s} s")


@pytest.mark.parametrize(
    "body",
    [
        SLEEP,
        "import mlx.core, mlx_lm; import time; time.sleep(600)",
        # In C, and deaf to signals as an evaluation is.
        "import ctypes; ctypes.CDLL(None).sleep(600)",
    ],
    ids=["asleep", "importing MLX", "in C"],
)
def test_a_child_is_gone_soon_after_its_parent_was_killed(body: str, family) -> None:
    parent = family(body)
    parent.kill()
    assert_all_gone(parent)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills at the end of a pipe")
def test_a_child_that_holds_the_gil_is_gone_as_well(family) -> None:
    parent = family("import ctypes; ctypes.PyDLL(None).sleep(600)")
    parent.kill()
    assert_all_gone(parent)


def test_siblings_are_gone_together(family) -> None:
    parent = family(SLEEP, SLEEP)
    parent.kill()
    assert_all_gone(parent)


def test_a_grandchild_does_not_inherit_the_pipe(family) -> None:
    grandchild = "import os, sys; os.fstat(int(sys.argv[1]))"
    parent = family(
        "import subprocess; child = subprocess.run([sys.executable, '-c', "
        f"{grandchild!r}, sys.argv[2]], close_fds=False, stderr=subprocess.DEVNULL); "
        f"print('inherited' if child.returncode == 0 else 'closed', flush=True); {SLEEP}"
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"closed\n"


def test_the_end_of_a_parent_is_noticed_while_another_process_holds_its_pipe() -> None:
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", PARENT_OF_HELD_PIPE, WATCH + SLEEP, str(read_end)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, bufsize=0, pass_fds=(read_end,)
    ) as parent:
        os.close(read_end)
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"watching\n"
        parent.kill()
        assert_all_gone(parent)
    os.close(write_end)


PARENT_OF_HELD_PIPE = """
import os, subprocess, sys, time
read_end = int(sys.argv[2])
subprocess.Popen(
    [sys.executable, "-c", sys.argv[1], str(os.getpid()), str(read_end)], pass_fds=(read_end,)
)
time.sleep(600)
"""


def test_a_parent_that_was_gone_before_the_watch_ends_the_child_at_once() -> None:
    read_end, write_end = os.pipe()
    not_its_parent = os.getppid()
    child = subprocess.run(
        [sys.executable, "-c", WATCH, str(not_its_parent), str(read_end)],
        pass_fds=(read_end,),
        capture_output=True,
        timeout=200,
    )
    os.close(read_end)
    os.close(write_end)
    assert child.returncode == ExitCode.PARENT_GONE
    assert child.stdout == b""


def test_a_pipe_that_ended_before_the_watch_ends_the_child() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    child = subprocess.run(
        [sys.executable, "-c", WATCH + SLEEP, str(os.getpid()), str(read_end)],
        pass_fds=(read_end,),
        stdout=subprocess.DEVNULL,
        timeout=200,
    )
    os.close(read_end)
    assert child.returncode in (ExitCode.PARENT_GONE, -signal.SIGKILL)


def test_a_descriptor_that_is_not_open_is_an_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.close(write_end)
    with pytest.raises(OSError, match="Bad file descriptor"):
        watch_parent(os.getppid(), read_end)
