"""Servers under test: their processes, start, stop, and memory."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.benchmarks.serving.client import Client, ServerError

START_TIMEOUT_S = 600.0
SAMPLE_S = 0.2
BLAS = "libopenblas.so.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """The command of one server. ``{port}`` in it stands for a free port."""

    name: str
    command: tuple[str, ...]
    model: str
    environment: Mapping[str, str]
    has_loads: bool = False


def peer_spec(model: Path, threads: int) -> ServerSpec:
    """mlx-lm's own server with its default settings, and OpenBLAS on this many threads."""
    environment = {"OPENBLAS_NUM_THREADS": str(threads)}
    if sys.platform == "linux":
        environment["LD_PRELOAD"] = BLAS
    command = (sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", "{port}")
    return ServerSpec(
        name=f"mlx_lm.server ({threads} BLAS thread{'s' if threads > 1 else ''})",
        command=(*command, "--log-level", "WARNING"),
        model="default_model",
        environment=environment,
    )


def our_spec(name: str, arguments: Sequence[str]) -> ServerSpec:
    """``mlx-dp serve`` with these arguments; it finds OpenBLAS and divides threads itself."""
    program = Path(sys.executable).with_name("mlx-dp")
    return ServerSpec(
        name=name,
        command=(str(program), "serve", "--port", "{port}", *arguments),
        model="bench",
        environment={},
        has_loads=True,
    )


class Server:
    """One running server, with a client for it. Its output goes to the log."""

    def __init__(self, spec: ServerSpec, log: Path) -> None:
        self.spec = spec
        self._log = log
        port = free_port()
        self.client = Client(port, spec.model)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [part.replace("{port}", str(port)) for part in spec.command],
                env={**os.environ, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    async def wait_ready(self) -> None:
        """Return once ``/health`` says 200. Raises ServerError when the process ends before."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_TIMEOUT_S
        while loop.time() < deadline:
            if self.ended:
                raise ServerError(
                    f"{self.spec.name} ended with {self._process.returncode}:\n{self.last_words()}"
                )
            try:
                await self.client.get_json("/health")
                return
            except (OSError, ServerError, ValueError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.2)
        raise ServerError(
            f"{self.spec.name} was not ready within {START_TIMEOUT_S:.0f} s:\n{self.last_words()}"
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def last_words(self) -> str:
        """The end of the server's log."""
        return self._log.read_text(errors="replace")[-2000:]

    def processes(self) -> list[psutil.Process]:
        """The server and all its descendants that are alive."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def rss_nbytes(self) -> int:
        """Resident memory of the whole tree. Pages that processes share count for each."""
        total = 0
        for process in self.processes():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def cpu_s(self) -> float:
        """CPU seconds of all processes that are alive."""
        total = 0.0
        for process in self.processes():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def controller_cpu_s(self) -> float:
        """CPU seconds of the server's first process, without its children."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """End the server, by force after a time-out."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            for process in self.processes():
                process.kill()
            self._process.wait()


class MemoryPeak:
    """Samples a server's memory in a thread, as a context manager."""

    def __init__(self, server: Server) -> None:
        self.nbytes = 0
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.nbytes = max(self.nbytes, self._server.rss_nbytes())
            self._stop.wait(SAMPLE_S)

    def __enter__(self) -> "MemoryPeak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
