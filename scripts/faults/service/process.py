"""A service under trial: the real command line, its log as events, its processes and leftovers."""

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from scripts.faults.service.client import MODEL, ChaosClient

START_TIMEOUT_S: Final = 180.0
EVENT_TIMEOUT_S: Final = 60.0
HOOK: Final = Path(__file__).resolve().parent / "hook" / "sitecustomize.py"
POISON_SEED: Final = 666_666
"""The hook recognises a poison request by this seed."""

_STARTED: Final = re.compile(r"worker (\d+): started\b.*?\bpid (\d+)")
_LOST: Final = re.compile(r"worker (\d+): lost\b")
_URL: Final = re.compile(r"ready at (http://\S+)")


class ServiceError(Exception):
    """An awaited event did not come. It is a violation and ends the trial."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the service's output, and when it came."""

    time_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resources of the controller's process; ``rss_nbytes`` counts this process alone."""

    fds: int
    threads: int
    rss_nbytes: int


def mlx_dp() -> str:
    """The program that scripts/serve becomes."""
    return str(Path(sys.executable).with_name("mlx-dp"))


class ChaosService:
    """One run of ``mlx-dp serve``. Call ``start``, and ``stop`` at the end in any case."""

    def __init__(self, arguments: tuple[str, ...], *, port: int = 0) -> None:
        # Its descendants are workers only, on macOS too.
        more = ("--port", str(port), "--served-model-name", MODEL, "--no-caffeinate")
        self._arguments = (*arguments, *more)
        self.orders = Path(tempfile.mkdtemp(prefix="chaos-"))
        shutil.copy(HOOK, self.orders)
        self.lines: list[Line] = []
        self._news = asyncio.Condition()
        self._ended = False
        self.pids: dict[int, int] = {}
        """The process of each worker's last start."""
        self.family: set[int] = set()
        """Every worker's pid since the start."""
        self.sockets: set[Path] = set()
        self._client: ChaosClient | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def client(self) -> ChaosClient:
        assert self._client is not None, "not started"
        return self._client

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self, *, ready: bool = True) -> None:
        """Start, and wait until every worker is ready unless told otherwise."""
        self._process = await asyncio.create_subprocess_exec(
            *(mlx_dp(), "serve", *self._arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(self._python_path())},
        )
        self._reader = asyncio.create_task(self._read())
        if ready:
            found = _URL.search((await self.wait_line("ready at http://", START_TIMEOUT_S)).text)
            assert found is not None
            self._client = ChaosClient(found[1])
            self._note_sockets()

    def _python_path(self) -> list[str]:
        """PYTHONPATH with the hook in front of the existing entries."""
        given = os.environ.get("PYTHONPATH")
        return [str(self.orders), *([given] if given else [])]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = Line(time.monotonic(), raw.decode(errors="replace").rstrip())
            if found := _STARTED.search(line.text):
                self.pids[int(found[1])] = int(found[2])
                self.family.add(int(found[2]))
            async with self._news:
                self.lines.append(line)
                self._news.notify_all()
        self._ended = True
        async with self._news:
            self._news.notify_all()

    def mark(self) -> int:
        """The end of the log, from which ``wait_line`` may search."""
        return len(self.lines)

    async def wait_line(
        self, pattern: str, timeout_s: float = EVENT_TIMEOUT_S, *, since: int = 0
    ) -> Line:
        """Return the first line that matches the pattern, from a mark on."""
        seen = since
        try:
            async with asyncio.timeout(timeout_s), self._news:
                while True:
                    for line in self.lines[seen:]:
                        seen += 1
                        if re.search(pattern, line.text):
                            return line
                    if self._ended:
                        break
                    await self._news.wait()
        except TimeoutError:
            pass
        raise ServiceError(f"no line with {pattern!r}; the last were:\n{self.last_words()}")

    def last_words(self) -> str:
        return "\n".join(line.text for line in self.lines[-15:])

    def log_lines(self) -> list[str]:
        """The whole log, with seconds since its first line, after the service's arguments."""
        begun_s = self.lines[0].time_s if self.lines else 0.0
        head = f"mlx-dp serve {' '.join(self._arguments)}"
        return [head, *(f"{at.time_s - begun_s:9.3f} {at.text}" for at in self.lines)]

    async def wait_lost(self, index: int, since: int) -> Line:
        return await self.wait_line(rf"worker {index}: lost\b", since=since)

    async def wait_ready(self, index: int, since: int) -> Line:
        return await self.wait_line(
            rf"(worker|owner) {index}: ready\b", START_TIMEOUT_S, since=since
        )

    def losses(self, since: int) -> list[tuple[float, int]]:
        """The time and the index of each worker loss, from a mark on."""
        found = [(at.time_s, _LOST.search(at.text)) for at in self.lines[since:]]
        return [(time_s, int(lost[1])) for time_s, lost in found if lost]

    def deaths(self, since: int) -> int:
        """The number of worker losses from a mark on."""
        return len(self.losses(since))

    async def get(self, path: str) -> Any:
        answer = await self.client.http.get(path)
        return answer.json()

    async def running(self) -> int:
        """Requests that are granted or queued."""
        total = (await self.get("/v1/loads"))["aggregate"]["num_total_reqs"]
        return int(total)

    async def counters(self) -> Counter[str]:
        """The controller's own counters, by name and label."""
        page = (await self.client.http.get("/metrics")).text
        found = re.findall(r"^mlx_dp:(\S+) (\S+)$", page, re.MULTILINE)
        return Counter({name: round(float(value)) for name, value in found})

    def order(self, index: int, words: str) -> None:
        """Order a worker to inject a fault into itself; see ``hook``."""
        pid = self.pids[index]
        (self.orders / str(pid)).write_text(words)
        os.kill(pid, signal.SIGUSR2)

    def footprint(self) -> Footprint:
        process = psutil.Process(self.pid)
        return Footprint(
            fds=process.num_fds(),
            threads=process.num_threads(),
            rss_nbytes=int(process.memory_info().rss),
        )

    def _note_sockets(self) -> None:
        for pid in self.pids.values():
            line = psutil.Process(pid).cmdline()
            endpoint = line[line.index("--endpoint") + 1]
            if endpoint.startswith("ipc://"):
                self.sockets.add(Path(endpoint.removeprefix("ipc://")))

    def endpoint(self) -> str:
        """The endpoint to which workers connect."""
        return f"ipc://{min(self.sockets)}"

    def identity(self, index: int) -> str:
        line = psutil.Process(self.pids[index]).cmdline()
        return line[line.index("--identity") + 1]

    def alive(self) -> list[int]:
        """All worker processes of this service, past and present, that still run."""
        return [pid for pid in self.family if is_worker(pid)]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def exited(self, timeout_s: float) -> int:
        """Return the exit status once the process is gone."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        except TimeoutError:
            raise ServiceError(f"no exit in {timeout_s:g} s:\n{self.last_words()}") from None

    async def stop(self) -> None:
        """Kill all remaining processes, and delete their orders."""
        if self._client is not None:
            await self._client.close()
        # A start that was cancelled has no process yet.
        if self._reader is not None:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            await self._reader
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.orders, ignore_errors=True)


def is_worker(pid: int) -> bool:
    """Whether the pid is a living worker, not another process that reused the number."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "mlx_dp.worker" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
