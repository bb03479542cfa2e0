"""Two hosts on one machine: a network namespace, and a virtual cable that can be cut."""

import os
import re
import shutil
import signal
import subprocess
from types import TracebackType
from typing import Self

IP = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")
NEAR, FAR = "198.51.100.1", "198.51.100.2"
"""Addresses reserved for documentation, which no real network uses."""
_PREFIX = "mlxdp"


def why_not() -> str | None:
    """Why there can be no second host here, or None."""
    if IP is None:
        return "there is no ip command (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{_PREFIX}{os.getpid()}"
    made = subprocess.run([IP, "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made: {made.stderr.strip()}"
    linked = subprocess.run(
        [IP, "link", "add", f"{name}t", "type", "veth", "peer", "name", f"{name}u", "netns", name],
        capture_output=True,
        text=True,
        check=False,
    )
    subprocess.run([IP, "netns", "del", name], check=True)
    if linked.returncode != 0:
        return f"no virtual cable can be made: {linked.stderr.strip()}"
    return None


class FarHost:
    """The other host, at FAR; this one is NEAR. Leaves neither namespace nor process behind."""

    def __init__(self) -> None:
        _sweep()
        self._name = f"{_PREFIX}{os.getpid()}"
        self._near, self._far = f"{self._name}n", f"{self._name}f"

    def __enter__(self) -> Self:
        run("netns", "add", self._name)
        try:
            run(
                *("link", "add", self._near, "type", "veth"),
                *("peer", "name", self._far, "netns", self._name),
            )
            run("addr", "add", f"{NEAR}/30", "dev", self._near)
            run("link", "set", self._near, "up")
            self._there("addr", "add", f"{FAR}/30", "dev", self._far)
            self._there("link", "set", self._far, "up")
            self._there("link", "set", "lo", "up")
        except BaseException:
            _remove(self._name)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _remove(self._name)

    def command(self, *command: str) -> tuple[str, ...]:
        """A command line that runs there."""
        assert IP is not None
        return (IP, "netns", "exec", self._name, *command)

    def cut(self) -> None:
        """Pull the cable: nothing arrives any more, and no end is notified."""
        self._there("link", "set", self._far, "down")

    def mend(self) -> None:
        self._there("link", "set", self._far, "up")

    def pids(self) -> list[int]:
        """The pids of all processes there."""
        return _pids(self._name)

    def _there(self, *arguments: str) -> None:
        run("-n", self._name, *arguments)


def run(*arguments: str) -> str:
    assert IP is not None
    done = subprocess.run([IP, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def _pids(name: str) -> list[int]:
    return [int(pid) for pid in run("netns", "pids", name).split()]


def _remove(name: str) -> None:
    for pid in _pids(name):
        os.kill(pid, signal.SIGKILL)
    # It would go with its namespace, but later.
    near = f"{name}n"
    if near in run("link", "show"):
        run("link", "del", near)
    run("netns", "del", name)


def _sweep() -> None:
    """Remove leftovers of a killed run."""
    for name in re.findall(rf"^{_PREFIX}\d+", run("netns", "list"), re.MULTILINE):
        if not os.path.exists(f"/proc/{name.removeprefix(_PREFIX)}"):
            _remove(name)
