"""``mlx.launch`` as a child, which starts ``mlx-dp worker`` on every host of a host file."""

import asyncio
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from mlx_dp.orchestrator.control.restart_budget import BackOff
from mlx_dp.orchestrator.process.exit_status import describe_exit
from mlx_dp.orchestrator.process.exit_watch import watch_exit
from mlx_dp.orchestrator.process.process_group import kill_group
from mlx_dp.orchestrator.process.worker_output import WorkerOutput
from mlx_dp.proto.group import DistributedBackend

_logger = logging.getLogger(__name__)

_END_GRACE_S: Final = 3.0


def launch_command(host_file: Path, backend: DistributedBackend, worker: list[str]) -> list[str]:
    """``worker``: the arguments of ``mlx-dp worker``, which has the same place on all hosts.

    The launcher tells each its rank, and of its devices what only a host file knows.
    """
    launcher = str(Path(sys.executable).with_name("mlx.launch"))
    ours = [sys.executable, "-m", "mlx_dp.orchestrator.cli", "worker", *worker, "--once"]
    return [launcher, "--backend", backend.value, "--hostfile", str(host_file), "--", *ours]


class MlxLaunch:
    """Keeps the launcher running, and starts it again when it has ended."""

    def __init__(self, command: list[str], write_line: Callable[[str], None]) -> None:
        self._command: Final = command
        self._write_line: Final = write_line
        self._back_off: Final = BackOff(first_s=1.0, longest_s=30.0, healthy_s=60.0)
        self._stopping: Final = asyncio.Event()

    def stop(self) -> None:
        """Let it end, which it does when its hosts do, and start it no more."""
        self._stopping.set()

    async def run(self) -> None:
        """Until ``stop``, and then until the child has ended."""
        rng = random.SystemRandom()
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                ending = describe_exit(await self._once())
            except OSError as error:
                ending = f"cannot be started: {error}"
            if self._stopping.is_set():
                return
            _logger.warning("mlx.launch %s", ending)
            delay_s = self._back_off.delay(time.monotonic() - began, rng)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    async def _once(self) -> int:
        read, write = os.pipe()
        try:
            # It spins where its input has ended, so that it gets one that never does.
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=write,
                stderr=write,
                process_group=0,
            )
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        output = WorkerOutput(read, self._write_line)
        ended = asyncio.Event()
        watch_exit(child, ended.set)
        try:
            await self._until(ended)
        finally:
            kill_group(child.pid)
            status = child.wait()
            output.finish()
            assert child.stdin is not None
            child.stdin.close()
        return status

    async def _until(self, ended: asyncio.Event) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        ending = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.is_set():
                await asyncio.wait({ending}, timeout=_END_GRACE_S)
        finally:
            stopping.cancel()
            ending.cancel()
