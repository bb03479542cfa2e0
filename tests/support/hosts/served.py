"""A real ``mlx-dp serve`` process, for tests under tests/system."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import psutil

DEADLINE_S = 200.0
"""Time limit of waits for an event, with reserve for a busy machine, below a test's time-out."""
COMMAND = (sys.executable, "-m", "mlx_dp.orchestrator.cli.entry", "serve")


class Served:
    """Starts the service, reads its output, and leaves no process behind."""

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        serves = command is COMMAND
        command = [*command, *arguments]
        if serves:
            # Its children are workers only, on macOS too.
            command.append("--no-caffeinate")
        if serves and "--port" not in arguments:
            command += ["--port", "0"]
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (environment or {}),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        workers = self.workers()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        for worker in workers:
            if worker.is_running():
                worker.kill()
        self._reader.join(DEADLINE_S)
        self.process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, text: str, deadline_s: float = DEADLINE_S) -> str:
        """Return the first line that has ``text``, now or until the deadline."""
        seen = 0
        ends_at = time.monotonic() + deadline_s
        while True:
            for line in self.lines[seen:]:
                seen += 1
                if text in line:
                    return line
            try:
                if self._news.get(timeout=max(0.0, ends_at - time.monotonic())) is None:
                    raise AssertionError(f"it ended without {text!r}:\n{self.output}")
            except queue.Empty:
                raise AssertionError(f"no {text!r} in time:\n{self.output}") from None

    def wait_until_ready(self, deadline_s: float = DEADLINE_S) -> str:
        """Return the URL once every owner is ready."""
        line = self.wait_for_line("ready at http://", deadline_s)
        self.url = "http://" + line.rpartition("http://")[2]
        return self.url

    def exit_status(self, timeout_s: float = DEADLINE_S) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(DEADLINE_S)
        return status

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def workers(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def get(self, path: str) -> tuple[int, Any]:
        """Return status and JSON (or text) of a route."""
        return self._fetch(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._fetch(request)

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the events' data of a streamed completion."""
        request = urllib.request.Request(
            self.url + "/v1/completions",
            data=json.dumps({"model": "fake", "stream": True, **body}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()

    def _fetch(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, _parsed(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error.read())

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._news.put(line)
        self._news.put(None)


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Poll a condition of another process, which sends no event, until the deadline."""
    ends_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_at, f"not in {timeout_s:g} s: {what}"
        time.sleep(0.02)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        # It ended between both calls.
        return False


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")
