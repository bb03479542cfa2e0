"""The order of a service's start and end, with a control plane that only records calls."""

import asyncio
import io
import os
import signal
from typing import NoReturn

import pytest
from rich.console import Console

from mlx_dp.orchestrator.api import OwnerState, ServiceState, ServiceStatus
from mlx_dp.orchestrator.cli import service_run
from mlx_dp.orchestrator.cli.service_run import ServiceRun
from mlx_dp.orchestrator.control.controller import ServiceDeadError
from mlx_dp.orchestrator.worker_states import RestartRefusedError
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.messages.events import FailureKind
from tests.support.control.owner_states import LOADING, READY


class Control:
    """Records calls; ``events`` are those of the control plane and of the HTTP server."""

    def __init__(self, *owners: OwnerState) -> None:
        self.events: list[str] = []
        self.owners = owners
        self.dead = asyncio.Event()
        self.bug: Exception | None = None
        self.kind: FailureKind | None = None
        self.kill_fails = False
        self.drained = asyncio.Event()
        self.closed = asyncio.Event()

    def state(self) -> ServiceState:
        ready = any(owner.status == "ready" for owner in self.owners)
        return ServiceState(
            status=ServiceStatus.READY if ready else ServiceStatus.STARTING,
            mode=ReplicaMode.DATA_PARALLEL,
            load_balance_method="round_robin",
            tp_size=1,
            queued_requests=0,
            queued_tokens=0,
            max_queued_requests=1,
            owners=self.owners,
        )

    async def drain(self, timeout_s: float) -> None:
        self.events.append(f"drain {timeout_s:g}")
        await self.drained.wait()
        self.events.append("stop workers")

    def restart_all(self) -> tuple[int, ...]:
        self.events.append("restart all")
        if len(self.events) > 2:
            raise RestartRefusedError("a restart is under way already")
        return (0, 1)

    def abandon(self) -> None:
        self.events.append("abandon")

    def kill_all(self) -> None:
        self.events.append("kill")
        if self.kill_fails:
            raise PermissionError("not ours")

    def close(self) -> None:
        self.events.append("close sockets")

    async def start(self) -> None:
        self.events.append("start")

    async def watch(self) -> NoReturn:
        await self.dead.wait()
        if self.bug is not None:
            raise self.bug
        raise ServiceDeadError("no weights", self.kind)

    async def stop(self) -> None:
        self.events.append("stop workers")


class Server:
    def __init__(self, control: Control) -> None:
        self._control = control

    async def run(self) -> None:
        await self._control.closed.wait()

    def stop(self) -> None:
        self._control.events.append("close endpoint")
        self._control.closed.set()


class Scenario:
    """One run in the present loop."""

    def __init__(self, *owners: OwnerState) -> None:
        self.control = Control(*owners)
        self.output = io.StringIO()
        run = ServiceRun(
            self.control,
            Server(self.control),
            Console(file=self.output, width=200),
            url="http://here",
            drain_timeout_s=3.0,
        )
        self.task = asyncio.create_task(run.run())

    async def ended(self) -> int:
        async with asyncio.timeout(20.0):
            return await self.task

    async def until(self, event: str) -> None:
        async with asyncio.timeout(20.0):
            while event not in self.control.events:
                await asyncio.sleep(0)


def test_a_signal_drains_and_then_ends_everything_with_status_zero() -> None:
    async def scenario() -> None:
        run = Scenario(READY)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await run.until("drain 3")
        assert run.control.events == ["start", "drain 3"], "the endpoint answers meanwhile"
        run.control.drained.set()
        assert await run.ended() == 0
        assert run.control.events[2:] == ["stop workers", "close endpoint"]
        assert "mlx-dp: ready at http://here" in run.output.getvalue()

    asyncio.run(scenario())


def test_an_internal_error_during_the_drain_is_no_clean_end() -> None:
    async def scenario() -> None:
        run = Scenario(READY)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await run.until("drain 3")
        run.control.bug = RuntimeError("the counts are wrong")
        run.control.dead.set()
        await asyncio.sleep(0)
        run.control.drained.set()
        with pytest.raises(RuntimeError, match="counts"):
            await run.ended()

    asyncio.run(scenario())


def test_a_drain_that_ctrl_c_asked_for_has_the_status_of_ctrl_c() -> None:
    async def scenario() -> None:
        run = Scenario(READY)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await run.until("drain 3")
        run.control.drained.set()
        assert await run.ended() == 128 + signal.SIGINT

    asyncio.run(scenario())


def test_a_second_signal_ends_requests_and_then_what_is_left_in_order() -> None:
    async def scenario() -> None:
        run = Scenario(READY)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await run.until("drain 3")
        os.kill(os.getpid(), signal.SIGINT)
        await run.until("abandon")
        assert not run.task.done(), "streams take their last event first"
        run.control.drained.set()
        assert await run.ended() == 128 + signal.SIGINT
        assert run.control.events[2:] == ["abandon", "stop workers", "close endpoint"]

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("signals", [2, 3])
def test_a_third_signal_or_what_outlasts_the_second_ends_at_once(
    signals: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(service_run.os, "_exit", left.append)
    monkeypatch.setattr(service_run, "LAST_EVENTS_S", 0.0 if signals == 2 else 60.0)

    async def scenario() -> None:
        run = Scenario(READY)
        run.control.kill_fails = fails
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await run.until("drain 3")
        os.kill(os.getpid(), signal.SIGTERM)
        await run.until("abandon")
        if signals == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        await run.until("kill")
        assert run.control.events[-1] == "close sockets"
        assert left == [128 + signal.SIGTERM]
        run.control.drained.set()
        await run.ended()

    asyncio.run(scenario())


def test_under_nohup_a_hang_up_stays_ignored_and_the_start_says_what_to_do() -> None:
    async def scenario() -> None:
        run = Scenario(READY)
        async with asyncio.timeout(20.0):
            while "ready at" not in run.output.getvalue():
                await asyncio.sleep(0)
        assert "SIGHUP stays ignored" in run.output.getvalue()
        assert "POST /workers/{n}/restart" in run.output.getvalue()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        run.control.drained.set()
        assert await run.ended() == 0
        assert "restart all" not in run.control.events

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sighup_restarts_the_workers_and_ends_nothing() -> None:
    async def scenario() -> None:
        run = Scenario(READY)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGHUP)
        await run.until("restart all")
        assert "SIGHUP: restarting workers 0, 1, one after another" in run.output.getvalue()
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(20.0):
            while "no restart: a restart is under way already" not in run.output.getvalue():
                await asyncio.sleep(0)
        assert not run.task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        run.control.drained.set()
        assert await run.ended() == 0

    asyncio.run(scenario())


def test_a_signal_while_loading_does_not_wait_for_the_load() -> None:
    async def scenario() -> None:
        run = Scenario(LOADING)
        run.control.drained.set()
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.ended() == 0
        assert "ready at" not in run.output.getvalue()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "status"), [(None, 1), (FailureKind.INTERNAL, 1), (FailureKind.CONFIG, 2)]
)
def test_the_end_of_all_workers_is_reported_in_one_sentence(
    kind: FailureKind | None, status: int
) -> None:
    async def scenario() -> None:
        run = Scenario(LOADING)
        run.control.kind = kind
        await asyncio.sleep(0)
        run.control.dead.set()
        assert await run.ended() == status
        assert run.control.events == ["start", "stop workers", "close endpoint"]
        assert run.output.getvalue().endswith("mlx-dp: error: no weights\n")

    asyncio.run(scenario())


def test_a_service_that_is_partly_ready_says_so() -> None:
    async def scenario() -> None:
        run = Scenario(READY, LOADING)
        async with asyncio.timeout(20.0):
            while "further workers still start" not in run.output.getvalue():
                await asyncio.sleep(0)
        assert "ready at" not in run.output.getvalue()
        run.control.drained.set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.ended() == 0

    asyncio.run(scenario())
