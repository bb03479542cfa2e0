"""The controller over real worker processes and a real socket, with the fake engine."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace

import psutil
import pytest

from mlx_dp.orchestrator.api import (
    Ended,
    Generation,
    Granted,
    NewTokens,
    ServiceStatus,
    Started,
)
from mlx_dp.orchestrator.control.controller import Controller, ServiceDeadError
from mlx_dp.orchestrator.control.limits import control_limits
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.options import ServeOptions
from mlx_dp.orchestrator.process.launcher import ProcessLauncher
from mlx_dp.proto.messages.commands import FakeEngineOptions
from mlx_dp.proto.messages.events import FailureKind, FinishReason
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.proto.wire.controller_channel import ControllerChannel
from tests.support.control.control_world import serve_options

pytestmark = pytest.mark.system

STEADY = FakeEngineOptions(decode_tokens_per_s=200.0)


def options(fake: FakeEngineOptions = STEADY, size: int = 2) -> ServeOptions:
    made = serve_options(size)
    return replace(made, worker=replace(made.worker, fake=fake, heartbeat_interval_s=0.1))


def request(seed: int, max_tokens: int = 60) -> Generation:
    return Generation(
        prompt_ids=(seed, 1, 2),
        max_tokens=max_tokens,
        stop_token_ids=(),
        params=SamplingParams(seed=seed),
    )


def with_controller(
    act: Callable[[Controller], Coroutine], made: ServeOptions | None = None
) -> None:
    async def run() -> None:
        launcher = ProcessLauncher(
            lambda index: dict(os.environ), lambda index, line: None, log_level="warning"
        )
        controller = Controller(made or options(), ControlPorts(ControllerChannel(), launcher))
        async with asyncio.timeout(60):
            await controller.start()
            try:
                await act(controller)
            finally:
                await controller.stop()

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    asyncio.run(run())
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def all_ready(controller: Controller) -> None:
    await until(lambda: all(owner.status == "ready" for owner in controller.state().owners))


async def read(controller: Controller, wanted: Generation) -> tuple[list[int], list[int], Ended]:
    """Return (owners, tokens, end)."""
    owners: list[int] = []
    ids: list[int] = []
    async for event in controller.submit(wanted):
        match event:
            case Granted(dp_rank=owner):
                owners.append(owner)
            case Started():
                pass
            case NewTokens(ids=new):
                ids += new
            case Ended():
                return owners, ids, event
    raise AssertionError("no end")


def pid_of(controller: Controller, owner: int) -> int:
    pid = controller.state().owners[owner].pid
    assert pid is not None
    return pid


def test_two_processes_share_the_requests() -> None:
    async def act(controller: Controller) -> None:
        await all_ready(controller)
        answers = await asyncio.gather(*[read(controller, request(n, 20)) for n in range(6)])
        assert {owner for owners, _, _ in answers for owner in owners} == {0, 1}
        assert all(end == Ended(reason=FinishReason.LENGTH) for _, _, end in answers)
        assert all(len(ids) == 20 for _, ids, _ in answers)

    with_controller(act)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)]
)
def test_a_killed_process_costs_no_token_and_is_replaced(number: signal.Signals) -> None:
    async def act(controller: Controller) -> None:
        await all_ready(controller)
        undisturbed = [await read(controller, request(n)) for n in range(4)]
        tasks = [asyncio.create_task(read(controller, request(n))) for n in range(4)]
        await until(lambda: controller.counters().generated_tokens > 4 * 60 + 40)
        os.kill(pid_of(controller, 0), number)
        answers = await asyncio.gather(*tasks)
        assert [ids for _, ids, _ in answers] == [ids for _, ids, _ in undisturbed]
        assert controller.counters().requests_replayed == 2
        await all_ready(controller)
        assert [owner.restarts for owner in controller.state().owners] == [1, 0]

    with_controller(act)


def test_a_stopped_process_is_replaced_and_changes_nothing() -> None:
    made = options()
    limits = control_limits(made.worker)
    hasty = replace(limits, liveness=replace(limits.liveness, hang_timeout_s=0.5))

    async def run() -> None:
        launcher = ProcessLauncher(
            lambda index: dict(os.environ), lambda index, line: None, log_level="warning"
        )
        outside = ControlPorts(ControllerChannel(), launcher)
        controller = Controller(made, outside, limits=hasty)
        async with asyncio.timeout(60):
            await controller.start()
            await all_ready(controller)
            _, undisturbed, _ = await read(controller, request(5, 200))
            task = asyncio.create_task(read(controller, request(5, 200)))
            await until(lambda: controller.counters().generated_tokens > 230)
            owner = next(each.dp_rank for each in controller.state().owners if each.running)
            os.kill(pid_of(controller, owner), signal.SIGSTOP)
            owners, ids, _ = await task
            assert ids == undisturbed
            assert owners == [owner, 1 - owner]
            await all_ready(controller)
            await controller.stop()

    asyncio.run(run())


def test_cancelling_frees_the_slot_at_the_worker() -> None:
    async def act(controller: Controller) -> None:
        await all_ready(controller)
        answer = controller.submit(request(1, 5000))
        await anext(aiter(answer))
        answer.cancel()
        await until(lambda: all(owner.running == 0 for owner in controller.state().owners))
        assert controller.counters().requests_aborted == 1

    with_controller(act)


def test_a_configuration_that_cannot_work_ends_it_with_the_cause() -> None:
    async def act(controller: Controller) -> None:
        with pytest.raises(ServiceDeadError, match="KV tokens") as dead:
            await controller.watch()
        assert dead.value.kind is FailureKind.CONFIG
        assert controller.state().status is ServiceStatus.DEAD

    with_controller(act, options(FakeEngineOptions(pool_tokens=1)))
