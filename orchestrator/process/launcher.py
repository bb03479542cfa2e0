"""Worker processes on this machine: spawn, watch, read output, kill and reap."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

import psutil

from mlx_dp.orchestrator.process.exit_watch import kill_group, watch_exit
from mlx_dp.orchestrator.process.open_files import check_open_files
from mlx_dp.orchestrator.process.stop_signals import stop_signals_blocked
from mlx_dp.orchestrator.process.worker_output import WorkerOutput

_logger = logging.getLogger(__name__)

_COMMAND: Final = (sys.executable, "-m", "mlx_dp.worker", "serve")
_FILES_OF_A_WORKER: Final = 16
"""More than its pipes, its exit watch and its connection need."""


class ProcessLauncher:
    """Starts workers as leaders of their own process groups.

    ``environment_of`` returns the whole environment of worker N; ``write_line`` gets each line
    that it prints. ``prepare`` runs before each start, and raises OSError when the endpoint that
    the worker would connect to is unusable. Never forks: a child that shares the parent's device
    library would hang.
    """

    def __init__(
        self,
        environment_of: Callable[[int], Mapping[str, str]],
        write_line: Callable[[int, str], None],
        *,
        log_level: str,
        command: tuple[str, ...] = _COMMAND,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._environment_of = environment_of
        self._write_line = write_line
        self._log_level = log_level
        self._command = command
        self._prepare = prepare

    def spawn(
        self, index: int, identity: str, endpoint: str, on_exit: Callable[[int], None]
    ) -> "ChildProcess":
        """Start a worker; see ``Launcher``."""
        if self._prepare is not None:
            self._prepare()
        # When the worker connects, libzmq aborts this process if it has no descriptor left.
        check_open_files(_FILES_OF_A_WORKER)
        # Both ends are close-on-exec. Only the child gets the read end, and siblings get neither: a
        # sibling with the write end would keep this child alive after our death.
        death_read, death_write = os.pipe()
        try:
            output_read, output_write = os.pipe()
        except OSError:
            os.close(death_read)
            os.close(death_write)
            raise
        try:
            with stop_signals_blocked():
                child = subprocess.Popen(
                    self._arguments(identity, endpoint, death_read),
                    stdin=subprocess.DEVNULL,
                    stdout=output_write,
                    stderr=output_write,
                    env=self._environment_of(index),
                    pass_fds=(death_read,),
                    process_group=0,
                )
        except BaseException:
            os.close(death_write)
            os.close(output_read)
            raise
        finally:
            os.close(death_read)
            os.close(output_write)
        output = WorkerOutput(output_read, lambda line: self._write_line(index, line))
        _logger.debug("worker %d: started as pid %d, %s", index, child.pid, identity)
        return ChildProcess(child, death_write, output, on_exit)

    def _arguments(self, identity: str, endpoint: str, death_fd: int) -> list[str]:
        return [
            *self._command,
            "--endpoint",
            endpoint,
            "--identity",
            identity,
            "--parent-pid",
            str(os.getpid()),
            "--death-fd",
            str(death_fd),
            "--log-level",
            self._log_level,
        ]


class ChildProcess:
    """One worker's process. Owns the write end of its death pipe and its output's reader."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        death_write: int,
        output: WorkerOutput,
        on_exit: Callable[[int], None],
    ) -> None:
        self._child = child
        self._death_write = death_write
        self._output = output
        self._on_exit = on_exit
        watch_exit(child, self._ended)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def halted(self) -> bool:
        try:
            return psutil.Process(self._child.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            # It is gone, or not ours to inspect.
            return False

    def abort(self) -> None:
        # Popen.send_signal would reap a child that has just ended.
        if self._child.returncode is None:
            os.kill(self._child.pid, stack_dump_signal())

    def kill(self) -> None:
        if self._child.returncode is None:
            kill_group(self._child.pid)

    def _ended(self) -> None:
        # Until the child is reaped no other process can get its pid, so its group can still be
        # named safely. This also ends any processes that it left behind.
        assert self._child.returncode is None, f"pid {self._child.pid} was already reaped"
        kill_group(self._child.pid)
        status = self._child.wait()
        self._output.finish()
        os.close(self._death_write)
        self._on_exit(status)


def stack_dump_signal(platform: str = sys.platform) -> signal.Signals:
    """Return the signal on which a worker's fault handler writes its stacks.

    SIGABRT also ends the worker. On macOS it would make a crash report, perhaps with a dialog,
    while the system may keep the model's memory: there the worker lives on until SIGKILL.
    """
    return signal.SIGUSR1 if platform == "darwin" else signal.SIGABRT
