"""Two hosts on one machine: an ssh server of the test's own, on two loopback addresses."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/local/sbin")
SSH = shutil.which("ssh")
FIRST, SECOND = "127.0.0.2", "127.0.0.3"
_DEADLINE_S = 30.0


def why_not() -> str | None:
    """Why there can be no ssh server here, or None."""
    if SSHD is None or SSH is None:
        return "there is no sshd or no ssh (package openssh-server)"
    if not sys.platform.startswith("linux"):
        return "only Linux has a network of loopback addresses"
    return None


class SshHosts:
    """The server, and an ``ssh`` for PATH that finds it. Needs no privileges."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = _free_port()
        self._server: subprocess.Popen[bytes] | None = None
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        self._write("sshd_config", self._server_settings())
        self._write("ssh_config", self._client_settings())
        script = self._write("bin/ssh", f'#!/bin/sh\nexec {SSH} -F {folder}/ssh_config "$@"\n')
        script.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process whose ssh should connect here."""
        return {"PATH": f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def __enter__(self) -> Self:
        if os.geteuid() == 0:
            # sshd's privilege separation directory; the package's service makes it, if
            # it ever ran.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        assert SSHD is not None
        log = (self._folder / "sshd.log").open("wb")
        with log:
            self._server = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self._folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        ends_at = time.monotonic() + _DEADLINE_S
        while not all(_answers(ip, self._port) for ip in (FIRST, SECOND)):
            said = (self._folder / "sshd.log").read_text()
            assert self._server.poll() is None, said
            assert time.monotonic() < ends_at, said
            time.sleep(0.02)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is None:
            return
        # Sessions outlive their server.
        sessions = psutil.Process(self._server.pid).children(recursive=True)
        self._server.kill()
        self._server.wait()
        for session in sessions:
            if session.is_running():
                session.kill()

    def _write(self, name: str, content: str) -> Path:
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return path

    def _server_settings(self) -> str:
        return (
            f"ListenAddress {FIRST}:{self._port}\nListenAddress {SECOND}:{self._port}\n"
            f"HostKey {self._folder}/host\nAuthorizedKeysFile {self._folder}/user.pub\n"
            "PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\n"
            "PermitRootLogin yes\n"
        )

    def _client_settings(self) -> str:
        return (
            f"Host *\n  Port {self._port}\n  IdentityFile {self._folder}/user\n"
            "  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        )


def session_of(pid: int) -> psutil.Process:
    """The server's process for the connection of this process."""
    parent = psutil.Process(pid).parent()
    assert parent is not None, f"{pid} has no parent"
    assert parent.name().startswith("sshd"), parent.cmdline()
    return parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((FIRST, 0))
        return int(probe.getsockname()[1])


def _answers(ip: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((ip, port)) == 0
