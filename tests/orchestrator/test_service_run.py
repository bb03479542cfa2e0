"""The order of a service's start and end, with a control plane that only keeps notes."""

import asyncio
import io
import os
import signal

import pytest
from owner_states import LOADING, READY
from rich.console import Console

from mlx_dp.orchestrator import service_run
from mlx_dp.orchestrator.service import OwnerState, ServiceState, ServiceStatus
from mlx_dp.orchestrator.service_run import EXIT_FAILED, ServiceRun
from mlx_dp.proto.parallel import ReplicaMode


class Notes:
    """A control plane and an HTTP server in one; ``events`` is what happened to them."""

    def __init__(self, *owners: OwnerState) -> None:
        self.events: list[str] = []
        self.owners = owners
        self.dead = asyncio.Event()
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

    def kill(self) -> None:
        self.events.append("kill")


class Control(Notes):
    async def run(self) -> None:
        await self.dead.wait()

    async def stop(self) -> None:
        self.events.append("stop workers")
        self.dead.set()


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
        assert run.control.events == ["drain 3"], "the endpoint answers while it drains"
        run.control.drained.set()
        assert await run.ended() == 0
        assert run.control.events[1:] == ["close endpoint", "stop workers"]
        assert "mlx-dp: ready at http://here" in run.output.getvalue()

    asyncio.run(scenario())


def test_a_second_signal_kills_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(service_run.os, "_exit", left.append)

    async def scenario() -> None:
        run = Scenario(READY)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await run.until("drain 3")
        os.kill(os.getpid(), signal.SIGTERM)
        await run.until("kill")
        assert left == [128 + signal.SIGTERM]
        run.control.drained.set()
        await run.ended()

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


def test_the_end_of_all_workers_is_a_failure() -> None:
    async def scenario() -> None:
        run = Scenario(LOADING)
        await asyncio.sleep(0)
        run.control.dead.set()
        assert await run.ended() == EXIT_FAILED
        assert run.control.events == ["close endpoint", "stop workers"]

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
