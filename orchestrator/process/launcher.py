"""Worker processes: spawned, watched, read, killed and reaped."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

import psutil

from mlx_dp.orchestrator.process.exit_watch import watch_exit
from mlx_dp.orchestrator.process.held_signals import held_signals
from mlx_dp.orchestrator.process.open_files import check_open_files
from mlx_dp.orchestrator.process.process_group import kill_group
from mlx_dp.orchestrator.process.stack_dump import stack_dump_signal
from mlx_dp.orchestrator.process.worker_output import WorkerOutput

_logger = logging.getLogger(__name__)

_COMMAND: Final = (sys.executable, "-m", "mlx_dp.worker", "serve")
_FILES_OF_A_WORKER: Final = 16
"""More than its pipes, its watch and its connection take."""


class ProcessLauncher:
    """Starts workers as leaders of their own process groups.

    ``environment_of`` gives the whole environment of worker N, and ``write_line`` takes what it
    prints. ``prepare`` is called before each start, and raises OSError where the endpoint that the
    worker would connect to cannot be used. Never forks: a child that shares the parent's device
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
        """Start a worker; see ``worker_process.Launcher``."""
        if self._prepare is not None:
            self._prepare()
        # It connects later, and libzmq ends this process where no descriptor is left for that.
        check_open_files(_FILES_OF_A_WORKER)
        # Both ends are close-on-exec. The child gets the read end alone, and siblings neither: a
        # sibling with the write end would keep this child alive after our death.
        death_read, death_write = os.pipe()
        try:
            output_read, output_write = os.pipe()
        except OSError:
            os.close(death_read)
            os.close(death_write)
            raise
        try:
            with held_signals():
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
            # It is gone, or not ours to look at.
            return False

    def abort(self) -> None:
        # Not by the child's own method, which would reap one that has just ended.
        if self._child.returncode is None:
            os.kill(self._child.pid, stack_dump_signal())

    def kill(self) -> None:
        if self._child.returncode is None:
            kill_group(self._child.pid)

    def _ended(self) -> None:
        # Before the child is reaped its pid cannot be taken by another, so that its group can
        # still be named safely: whatever it left behind goes too.
        assert self._child.returncode is None, f"pid {self._child.pid} was reaped by somebody else"
        kill_group(self._child.pid)
        status = self._child.wait()
        self._output.finish()
        os.close(self._death_write)
        self._on_exit(status)
