"""Runs ``mlx.launch``, which starts ``mlx-dp worker`` on every host of a host file.

Watches its output and its hosts, and runs it again when one of them is lost.
"""

import asyncio
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mlx_dp.orchestrator.exit_status import describe_exit
from mlx_dp.orchestrator.process.exit_watch import kill_group, watch_exit
from mlx_dp.orchestrator.process.remote.host_file import Host
from mlx_dp.orchestrator.process.remote.host_login import LOCAL_HOST, login_fault
from mlx_dp.orchestrator.process.stop_signals import EXIT_CONFIG
from mlx_dp.orchestrator.process.worker_output import WorkerOutput
from mlx_dp.orchestrator.restart_budget import BackOff, RestartBudget
from mlx_dp.proto.messages.group import DistributedBackend

_logger = logging.getLogger(__name__)

_END_GRACE_S: Final = 3.0
_LAST_WORDS_S: Final = 0.4
_LOOK_S: Final = 1.0
_HEALTHY_S: Final = 60.0
_FIRST_DELAYS: Final = 4.0
"""The first delay, in units of a worker's: other machines take longer to come back."""
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_NODE_ENDED: Final = re.compile(
    r"Node with rank (?P<rank>[0-9]{1,5}) (?:exited with code (?P<status>-?[0-9]{1,5})|was killed)"
)
_OWN_TRACE: Final = re.compile(r"Exception in thread \S+ \(_thread_fn\):")
"""A thread of mlx.launch fails when it stops nodes that are not connected or have a terminal."""
_REFUSAL_PREFIX: Final = "mlx-dp: error: "
_CONNECTION_LOST: Final = 255
"""ssh's exit status when its connection was lost."""


def launch_command(host_file: Path, backend: DistributedBackend, worker: list[str]) -> list[str]:
    """Build the command of the launcher. ``worker``: the arguments of ``mlx-dp worker``.

    The program has the same path on all hosts. The launcher sets the rank of each process, and the
    devices that the host file names.
    """
    launcher = str(Path(sys.executable).with_name("mlx.launch"))
    ours = [sys.executable, "-m", "mlx_dp.orchestrator.cli.entry", "worker", *worker, "--once"]
    return [launcher, "--backend", backend.value, "--hostfile", str(host_file), "--", *ours]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The command to launch, its hosts, and the budget for retries."""

    command: list[str]
    hosts: tuple[Host, ...]
    max_restarts: int = 5
    restart_window_s: float = 60.0
    restart_delay_s: float = 0.25
    patience_s: float = 10.0
    """A rank that joined may be absent for this long before all are launched again."""


@dataclass(frozen=True, slots=True)
class LaunchEnd:
    """Why one run of the launcher ended. ``final``: another run would end in the same way."""

    cause: str
    final: bool = False


class MlxLaunch:
    """Keeps the launcher running: restarts it after each end, within a budget."""

    def __init__(
        self,
        plan: LaunchPlan,
        write_line: Callable[[str], None],
        present: Callable[[], Set[int]],
    ) -> None:
        """``present``: the ranks that have a host now."""
        self._plan: Final = plan
        self._write_line: Final = write_line
        self._present: Final = present
        self._back_off: Final = BackOff(
            first_s=_FIRST_DELAYS * plan.restart_delay_s, longest_s=30.0, healthy_s=_HEALTHY_S
        )
        self._budget: Final = RestartBudget(plan.max_restarts, plan.restart_window_s)
        self._stopping: Final = asyncio.Event()

    def stop(self) -> None:
        """Stop restarting it. It ends when its hosts do."""
        self._stopping.set()

    async def run(self) -> LaunchEnd | None:
        """Run until ``stop`` and return None, or until retrying is useless and return the end."""
        rng = random.SystemRandom()
        while True:
            began = time.monotonic()
            end = await self._once()
            now = time.monotonic()
            if self._stopping.is_set():
                return None
            if now - began >= _HEALTHY_S:
                self._budget.succeeded()
            if end.final:
                return end
            if not self._budget.allow(now):
                tries = f"gave up after --max-restarts {self._plan.max_restarts}"
                return LaunchEnd(f"{end.cause} ({tries})")
            delay_s = self._back_off.delay(now - began, rng)
            _logger.warning("%s; the hosts are launched again in %.1f s", end.cause, delay_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return None

    async def _once(self) -> LaunchEnd:
        plan = self._plan
        fault = await self._unless_stopped(
            login_fault((host.ssh for host in plan.hosts), sys.executable)
        )
        if fault is not None or self._stopping.is_set():
            return LaunchEnd(fault or "it was asked to stop")
        try:
            return await self._launch()
        except OSError as error:
            return LaunchEnd(f"mlx.launch cannot be started: {error}")

    async def _unless_stopped(self, asking: Coroutine[Any, Any, str | None]) -> str | None:
        stopping = asyncio.create_task(self._stopping.wait())
        asked = asyncio.create_task(asking)
        try:
            await asyncio.wait({stopping, asked}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            stopping.cancel()
            if not asked.done():
                asked.cancel()
                await asyncio.wait({asked})

    async def _launch(self) -> LaunchEnd:
        said = LaunchOutput(self._plan.hosts)
        ended = asyncio.Event()
        lost: int | None = None
        child, output = self._spawn(said, ended)
        watch_exit(child, ended.set)
        try:
            lost = await self._until(ended)
            if said.ended is not None:
                # The launcher prints the last output of a node after it reports the node's end.
                await asyncio.sleep(_LAST_WORDS_S)
        finally:
            # The launcher fails to stop nodes that have a terminal. Their processes end because
            # the connection closes.
            kill_group(child.pid)
            status = child.wait()
            output.finish()
            assert child.stdin is not None
            child.stdin.close()
        if lost is not None:
            host = self._plan.hosts[lost].ssh
            return LaunchEnd(f"rank {lost}: {host} has not been heard for too long")
        return LaunchEnd(said.cause(describe_exit(status)), said.final)

    def _spawn(
        self, said: "LaunchOutput", ended: asyncio.Event
    ) -> tuple["subprocess.Popen[bytes]", WorkerOutput]:
        def take(line: str) -> None:
            plain = without_escapes(line)
            of_use = said.feed(plain)
            if of_use:
                self._write_line(plain)
            if said.ended is not None:
                ended.set()

        read, write = os.pipe()
        try:
            # mlx.launch spins once its input has ended, so it gets an input that never ends.
            child = subprocess.Popen(
                self._plan.command,
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
        return child, WorkerOutput(read, take)

    async def _until(self, ended: asyncio.Event) -> int | None:
        """Wait for the launcher's end. Return a rank whose host was lost without notice, if any."""
        watch = LaunchWatch(frozenset(range(len(self._plan.hosts))), self._plan.patience_s)
        stopping = asyncio.create_task(self._stopping.wait())
        ending = asyncio.create_task(ended.wait())
        try:
            while not stopping.done() and not ending.done():
                await asyncio.wait(
                    {stopping, ending}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                lost = watch.update(self._present(), time.monotonic())
                if lost is not None and not ended.is_set() and not stopping.done():
                    return lost
            if not ended.is_set():
                await asyncio.wait({ending}, timeout=_END_GRACE_S)
        finally:
            stopping.cancel()
            ending.cancel()
        return None


@dataclass(slots=True)
class LaunchOutput:
    """The parsed output of one run of the launcher: which node ended first, and why.

    ``ended``: the rank of that node, or None.
    """

    hosts: Sequence[Host]
    ended: int | None = None
    status: int | None = None
    _refusal: str = ""
    _last: str = ""
    _tracing: bool = False

    def feed(self, line: str) -> bool:
        """Parse a line without escapes; return True if it is worth showing."""
        if self._track_traceback(line):
            return False
        found = _NODE_ENDED.search(line)
        if found is not None:
            if self.ended is None:
                self.ended = int(found["rank"])
                self.status = None if found["status"] is None else int(found["status"])
            return False
        if line.startswith(_REFUSAL_PREFIX):
            self._refusal = line.removeprefix(_REFUSAL_PREFIX)
        self._last = line or self._last
        return bool(line)

    def _track_traceback(self, line: str) -> bool:
        """Track the launcher's own tracebacks; return True for their lines."""
        if _OWN_TRACE.match(line):
            self._tracing = True
            return True
        if not self._tracing:
            return False
        # A traceback ends with the first line that is not indented.
        self._tracing = line.startswith((" ", "Traceback "))
        return True

    @property
    def final(self) -> bool:
        """Whether a host refused its configuration, and would refuse it again."""
        return self.status == EXIT_CONFIG and bool(self._refusal)

    def cause(self, launcher_ending: str) -> str:
        """Say why this run ended. ``launcher_ending``: how the launcher itself ended."""
        if self.ended is None:
            said = f": {self._last}" if self._last else ""
            return f"mlx.launch {launcher_ending}{said}"
        host = self._host(self.ended)
        place = f"rank {self.ended} on {host}"
        if self.status == _CONNECTION_LOST and host != LOCAL_HOST:
            return f"{place}: its ssh connection was lost"
        how = "was killed" if self.status is None else f"exited with status {self.status}"
        said = f": {self._refusal}" if self._refusal else ", and its last lines say why"
        return f"{place}: mlx-dp worker {how}{said}"

    def _host(self, rank: int) -> str:
        return self.hosts[rank].ssh if rank < len(self.hosts) else "an unknown host"


def without_escapes(line: str) -> str:
    """The line without colours and cursor movements."""
    return _ESCAPES.sub("", line).rstrip()


@dataclass(slots=True)
class LaunchWatch:
    """Detects launched hosts that are lost without notice. Pure: a rank that joined must stay.

    After a cable is cut the host gives up, but neither ssh nor the launcher notices.
    """

    ranks: Set[int]
    patience_s: float
    _joined: set[int] = field(default_factory=set)
    _missing_since: dict[int, float] = field(default_factory=dict)

    def update(self, present: Set[int], now: float) -> int | None:
        """Note the ranks that have a host; return one that was absent for too long, if any."""
        self._joined |= present
        for rank in sorted(self.ranks):
            if rank in present or rank not in self._joined:
                self._missing_since.pop(rank, None)
            elif now - self._missing_since.setdefault(rank, now) > self.patience_s:
                return rank
        return None
