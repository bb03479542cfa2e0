"""Checks that ssh reaches the hosts of a host file without a prompt.

``mlx.launch`` hides ssh's messages, and an ssh that asks for a password would wait for ever. So
before each launch, this logs in to every host once, in batch mode.
"""

import asyncio
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from typing import Final

LOCAL_HOST: Final = "127.0.0.1"
"""``mlx.launch`` starts processes on this host without ssh."""

_CONNECT_S: Final = 10
_LIMIT_S: Final = 30.0
_SSH_FAILED: Final = 255
_MAX_CHARS: Final = 300
_OPTIONS: Final = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}")


async def login_fault(hosts: Iterable[str], python: str) -> str | None:
    """Return the reason why workers cannot be launched on one of the hosts, or None."""
    others = [host for host in dict.fromkeys(hosts) if host != LOCAL_HOST]
    faults = await asyncio.gather(*(_fault(host, python) for host in others))
    return next((fault for fault in faults if fault is not None), None)


async def _fault(host: str, python: str) -> str | None:
    asked = shlex.join(["test", "-x", python])
    try:
        status, said = await _run(["ssh", *_OPTIONS, "--", host, asked])
    except OSError as error:
        return f"ssh cannot be started, which --hostfile needs: {error}"
    return describe_login(host, python, status, said)


async def _run(command: Sequence[str]) -> tuple[int | None, str]:
    """Return the exit status (None: timed out) and stderr."""
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # Keep Ctrl-C from reaching it.
        process_group=0,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            _, said = await child.communicate()
    except TimeoutError:
        return None, ""
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return child.returncode, said.decode("utf-8", "replace")


def describe_login(host: str, python: str, status: int | None, said: str) -> str | None:
    """Describe a failed login in a sentence; None if it worked."""
    target = shlex.quote(host)
    if status == 0:
        return None
    if status is None:
        return (
            f"ssh to {host} did not end within {_LIMIT_S:g} s: see what 'ssh {target} true' does "
            "in a terminal"
        )
    if status == _SSH_FAILED:
        return (
            f"ssh to {host} failed ({ssh_words(said)}): 'ssh {target} true' must work on this "
            "machine without a question, so try it in a terminal, or name another host in "
            "--hostfile"
        )
    return (
        f"{host} has no {python}, which --hostfile starts there: install mlx-dp at the same place "
        "on every host"
    )


def ssh_words(said: str) -> str:
    """Return the last line that ssh printed, which is the cause: banners and notes precede it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:_MAX_CHARS].rstrip(".") if lines else "it gave no reason"
