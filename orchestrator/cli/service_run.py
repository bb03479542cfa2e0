"""Runs the service from start to end, and determines its exit status."""

import asyncio
import os
import signal
import time
from contextlib import ExitStack
from typing import Any, Final, NoReturn, Protocol

from rich.console import Console

from mlx_dp.orchestrator.api import ServiceState, ServiceStatus, WorkerStatus
from mlx_dp.orchestrator.cli.start_display import StartDisplay, start_display
from mlx_dp.orchestrator.control.controller import ServiceDeadError
from mlx_dp.orchestrator.http.connection.server import EmbeddedServer
from mlx_dp.orchestrator.process.log_output import write_plain
from mlx_dp.orchestrator.process.log_stream import drain_stderr
from mlx_dp.orchestrator.process.sighup import SighupHandler
from mlx_dp.orchestrator.process.stop_signals import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_SIGNAL_BASE,
    StopSignals,
)
from mlx_dp.orchestrator.worker_states import RestartRefusedError
from mlx_dp.proto.messages.events import FailureKind

LAST_EVENTS_S: Final = 0.6
"""The time for streams to send their last event after a second signal."""
LAST_WORDS_S: Final = 0.2
"""How long an immediate end waits for the log's reader."""
_REFRESH_S: Final = 0.1
_CONFIGURATION: Final = (FailureKind.CONFIG, FailureKind.UNSUPPORTED_MODEL)
_SETTLED: Final = (WorkerStatus.READY, WorkerStatus.FAILED)


class ControlPlane(Protocol):
    """The part of the controller that starts and ends the service."""

    async def start(self) -> None: ...

    def state(self) -> ServiceState: ...

    async def watch(self) -> NoReturn:
        """Raises ServiceDeadError once no worker can serve any more."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let running ones finish within the time, then stop."""

    async def stop(self) -> None:
        """End the workers, and wait for their exit."""

    def abandon(self) -> None:
        """End every request with an error and every worker by SIGKILL, without waiting."""

    def kill_all(self) -> None:
        """Send SIGKILL to every worker, without waiting."""

    def close(self) -> None:
        """Remove the sockets, before an immediate end."""

    def restart_all(self) -> tuple[int, ...]:
        """Replace every ready worker, one after another. Raises RestartRefusedError."""


class ServiceRun:
    """Runs controller and HTTP server in one loop, until a signal or the loss of all workers."""

    def __init__(
        self,
        control: ControlPlane,
        server: EmbeddedServer,
        console: Console,
        *,
        url: str,
        drain_timeout_s: float,
    ) -> None:
        self._control = control
        self._server = server
        self._console = console
        self._url = url
        self._drain_timeout_s = drain_timeout_s
        self._hurried: signal.Signals | None = None

    async def run(self) -> int:
        """Run, and return the exit status: of the signal that drained, or of a failure."""
        signals = self._listen()
        await self._control.start()
        watch = asyncio.create_task(self._control.watch())
        serving = asyncio.create_task(self._server.run())
        stop = asyncio.create_task(signals.requested.wait())
        tasks: set[asyncio.Task[Any]] = {watch, serving, stop}
        try:
            await self._start(tasks)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain()
                self._raise_internal_error(watch)
                if self._hurried is not None:
                    return EXIT_SIGNAL_BASE + self._hurried
                return signals.status
            await self._control.stop()
            return self._failure(watch)
        finally:
            self._server.stop()
            await serving
            watch.cancel()
            stop.cancel()

    def _listen(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        signals = StopSignals(self._hurry, self._end_at_once)
        signals.install(loop)
        if not SighupHandler(self._restart_all, signals.requested.set).install(loop):
            self._say(
                "mlx-dp: SIGHUP stays ignored, as under nohup: POST /workers/{n}/restart "
                "replaces a worker"
            )
        return signals

    async def _start(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Show the workers' start until each is ready or has failed."""
        began_at = time.monotonic()
        partly = False
        with start_display(self._console) as display:
            while not self._show(display, time.monotonic() - began_at):
                state = self._control.state()
                if state.status is ServiceStatus.READY and not partly:
                    partly = True
                    self._say(f"mlx-dp: serving at {self._url}, further workers still start")
                done, _ = await asyncio.wait(
                    tasks, timeout=_REFRESH_S, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    return
        if self._control.state().status is ServiceStatus.READY:
            self._say(f"mlx-dp: ready at {self._url}")

    def _show(self, display: StartDisplay, elapsed_s: float) -> bool:
        owners = self._control.state().owners
        display.show(owners, elapsed_s)
        return all(owner.status in _SETTLED for owner in owners)

    async def _drain(self) -> None:
        state = self._control.state()
        running = sum(owner.running for owner in state.owners) + state.queued_requests
        requests = "1 request" if running == 1 else f"{running} requests"
        self._say(
            f"mlx-dp: draining {requests} for up to {self._drain_timeout_s:g} s; "
            "a second signal ends them with an error"
        )
        await self._control.drain(self._drain_timeout_s)

    def _failure(self, watch: asyncio.Task[NoReturn]) -> int:
        """Say why the service ended; raise an internal error instead."""
        if not watch.done():
            self._say("mlx-dp: error: the HTTP server ended by itself")
            return EXIT_FAILED
        error = watch.exception()
        assert error is not None, "the watch ended without a reason"
        if not isinstance(error, ServiceDeadError):
            raise error
        self._say(f"mlx-dp: error: {error}")
        return EXIT_CONFIG if error.kind in _CONFIGURATION else EXIT_FAILED

    def _raise_internal_error(self, watch: asyncio.Task[NoReturn]) -> None:
        """Raise an internal error, even after an orderly end."""
        if watch.done() and not isinstance(error := watch.exception(), ServiceDeadError):
            assert error is not None, "the watch ended without a reason"
            raise error

    def _restart_all(self) -> None:
        try:
            indices = self._control.restart_all()
        except RestartRefusedError as error:
            self._say(f"mlx-dp: SIGHUP: no restart: {error}")
        else:
            workers = ", ".join(map(str, indices))
            self._say(f"mlx-dp: SIGHUP: restarting workers {workers}, one after another")

    def _hurry(self, number: signal.Signals) -> None:
        """A second signal: end all streams with an error event."""
        self._hurried = number
        # Neither a client that reads nothing nor a process that does not die may delay the end.
        asyncio.get_running_loop().call_later(LAST_EVENTS_S, self._end_at_once, number)
        self._control.abandon()

    def _end_at_once(self, number: signal.Signals) -> None:
        with ExitStack() as ends:
            # Waits for nothing. All state is in memory, so there is little to clean up.
            ends.callback(os._exit, EXIT_SIGNAL_BASE + number)
            ends.callback(drain_stderr, LAST_WORDS_S)
            ends.callback(self._control.close)
            ends.callback(self._console.show_cursor, True)
            self._control.kill_all()

    def _say(self, line: str) -> None:
        write_plain(self._console, line)
