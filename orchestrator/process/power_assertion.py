"""Keeps a Mac from idle sleep while this process serves."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

_PROGRAM: Final = "caffeinate"
_END_GRACE_S: Final = 1.0


@contextmanager
def keep_awake(
    environment: Mapping[str, str],
    warn: Callable[[str], None],
    *,
    wanted: bool = True,
    platform: str = sys.platform,
) -> Iterator[None]:
    """Run ``caffeinate`` beside this process, on macOS and if ``wanted``.

    The child ends with this process, however that ends. Failing to start it is only a warning.
    """
    if not wanted or platform != "darwin":
        yield
        return
    child = _start(environment, warn)
    try:
        yield
    finally:
        if child is not None:
            _end(child, warn)


def _start(
    environment: Mapping[str, str], warn: Callable[[str], None]
) -> subprocess.Popen[bytes] | None:
    path = environment.get("PATH")
    program = shutil.which(_PROGRAM, path=path)
    try:
        if program is None:
            raise FileNotFoundError(f"it is not in PATH ({path})")
        return subprocess.Popen(
            [program, "-i", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C goes to our whole process group, and draining follows it.
            process_group=0,
        )
    except OSError as error:
        warn(
            f"{_PROGRAM} cannot be started ({error}): this machine may go to sleep while it "
            "serves; --no-caffeinate leaves it out"
        )
        return None


def _end(child: subprocess.Popen[bytes], warn: Callable[[str], None]) -> None:
    status = child.poll()
    if status is not None:
        warn(f"{_PROGRAM} had ended with status {status}: this machine may have slept")
        return
    child.terminate()
    try:
        child.wait(_END_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
