"""The controller on an event loop: its timers, its socket, its end. Workers are fake."""

import asyncio
import random
from collections.abc import Callable, Coroutine

import pytest

from mlx_dp.orchestrator.api import Ended, NewTokens, OverloadedError, Service, ServiceStatus
from mlx_dp.orchestrator.control.controller import Controller, ServiceDeadError
from mlx_dp.orchestrator.control.limits import ControlLimits, control_limits
from mlx_dp.orchestrator.control.requests.lifecycle import RequestLifecycle
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.control.workers.record import FailureDomains
from mlx_dp.orchestrator.options import QueueOptions, ServeOptions, WorkerOptions
from mlx_dp.orchestrator.service_counters import RequestTimings
from mlx_dp.orchestrator.worker_states import RestartRefusedError
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.events import FailureKind, FinishReason
from tests.support.control.control_world import World, serve_options
from tests.support.control.fake_worker import FakeWorker, expected, generation, ready

QUICK = ControlLimits(tick_s=0.01, stop_grace_s=0.2)


class Stage:
    """A controller over a fake world whose workers run by themselves."""

    def __init__(self, options: ServeOptions | None = None) -> None:
        self.world = World(options, limits=QUICK)
        self.controller = Controller(
            options or serve_options(), ControlPorts(self.world, self.world), limits=QUICK
        )
        self.on_turn: Callable[[], None] = lambda: None

    async def run_workers(self) -> None:
        while True:
            for worker in self.world.alive():
                if not worker.serving and not worker.signals:
                    self.world_greet(worker)
                worker.run_once()
                worker.send_heartbeat()
            self.on_turn()
            self.world.on_arrival()
            await asyncio.sleep(0.001)

    def world_greet(self, worker: FakeWorker) -> None:
        if not getattr(worker, "greeted", False):
            worker.greeted = True
            worker.hello()

    async def ready(self) -> None:
        while not all(owner.status == "ready" for owner in self.controller.state().owners):
            await asyncio.sleep(0.001)


def play(act: Callable[[Stage], Coroutine], options: ServeOptions | None = None) -> None:
    async def run() -> None:
        stage = Stage(options)
        turning = asyncio.create_task(stage.run_workers())
        try:
            async with asyncio.timeout(30):
                await stage.controller.start()
                await act(stage)
                await stage.controller.stop()
        finally:
            turning.cancel()
        assert not stage.world.alive()

    asyncio.run(run())


def test_it_is_a_service() -> None:
    async def act(stage: Stage) -> None:
        service: Service = stage.controller
        assert service.state().status is ServiceStatus.STARTING
        assert service.limits() is None
        with pytest.raises(OverloadedError):
            service.submit(generation())
        await stage.ready()
        assert service.limits() == AdmissionLimits(context_length=1000, pool_tokens=1000)
        state = service.state()
        assert state.status is ServiceStatus.READY
        assert [owner.capacity for owner in state.owners] == [ready().capacity] * 2
        answer = service.submit(generation(max_tokens=5))
        assert service.state().owners[0].running == 1
        events = [event async for event in answer]
        assert events[-1] == Ended(reason=FinishReason.LENGTH)
        ids = [token for each in events if isinstance(each, NewTokens) for token in each.ids]
        assert ids == expected(generation(), 5)
        assert service.counters().requests_ok == 1

    play(act)


def test_observers_are_told_of_each_end_once() -> None:
    class Observer:
        told: list[RequestTimings] = []  # noqa: RUF012 - one test, one list

        def started(self, queued_s: float) -> None: ...

        def first_token(self, waited_s: float) -> None: ...

        def next_tokens(self, gap_s: float) -> None: ...

        def ended(self, timings: RequestTimings) -> None:
            self.told.append(timings)

    async def act(stage: Stage) -> None:
        await stage.ready()
        stage.controller.observe(Observer())
        async for _ in stage.controller.submit(generation(max_tokens=5)):
            pass

    play(act)
    (timings,) = Observer.told
    assert (timings.reason, timings.dp_rank) == (FinishReason.LENGTH, 0)
    assert (timings.prompt_tokens, timings.output_tokens) == (3, 5)
    assert timings.granted_s is not None
    assert timings.first_token_s is not None
    assert timings.last_token_s is not None
    assert 0 <= timings.granted_s <= timings.first_token_s <= timings.last_token_s
    assert timings.last_token_s <= timings.ended_s
    assert timings.time_per_output_token_s is not None


def test_an_exit_is_acted_on_at_once_and_the_stream_goes_on() -> None:
    async def act(stage: Stage) -> None:
        await stage.ready()
        answer = stage.controller.submit(generation(max_tokens=60))
        ids: list[int] = []
        async for event in answer:
            if isinstance(event, NewTokens):
                if not ids:
                    stage.world.worker(0).die(-9)
                ids += event.ids
        assert ids == expected(generation(), 60)
        assert stage.controller.counters().requests_replayed == 1

    play(act)


def test_a_flush_waits_for_its_owners_and_no_longer_than_it_may() -> None:
    async def act(stage: Stage) -> None:
        await stage.ready()
        flushed = await stage.controller.flush_cache(5.0)
        assert [result.outcome for result in flushed] == ["flushed", "flushed"]
        stage.world.worker(1).stopped = True
        flushed = await stage.controller.flush_cache(0.02)
        assert [result.outcome for result in flushed] == ["flushed", "timeout"]
        stage.world.worker(1).stopped = False

    play(act)


def test_a_restart_on_request_is_shown_and_ends_no_stream() -> None:
    async def act(stage: Stage) -> None:
        await stage.ready()
        answer = stage.controller.submit(generation(max_tokens=300))
        assert stage.controller.restart_all() == (0, 1)
        assert [worker.restart_asked for worker in stage.controller.workers()] == [True, True]
        with pytest.raises(RestartRefusedError):
            stage.controller.restart_worker(0)
        ids: list[int] = []
        async for event in answer:
            if isinstance(event, NewTokens):
                ids += event.ids
        assert ids == expected(generation(), 300)
        while any(worker.restart_asked for worker in stage.controller.workers()):
            await asyncio.sleep(0.001)
        workers = stage.controller.workers()
        assert [worker.epoch for worker in workers] == [1, 1]
        assert [worker.last_cause for worker in workers] == ["restarted on request"] * 2
        assert [worker.restarts_in_window for worker in workers] == [0, 0]
        assert all(0.0 <= worker.status_s < 10.0 for worker in workers)
        counters = stage.controller.counters()
        assert (counters.worker_deaths, counters.requests_error) == (0, 0)

    play(act)


def test_draining_finishes_what_is_in_hand_and_leaves_no_process() -> None:
    async def act(stage: Stage) -> None:
        await stage.ready()
        answers = [stage.controller.submit(generation(max_tokens=20)) for _ in range(6)]
        draining = asyncio.create_task(stage.controller.drain(5.0))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            stage.controller.submit(generation())
        assert stage.controller.state().status is ServiceStatus.DRAINING
        with pytest.raises(RestartRefusedError, match="shutting down"):
            stage.controller.restart_all()
        for answer in answers:
            assert [event async for event in answer][-1] == Ended(reason=FinishReason.LENGTH)
        await draining
        assert not stage.world.alive()

    play(act)


def test_what_outlasts_the_drain_ends_with_an_error() -> None:
    async def act(stage: Stage) -> None:
        await stage.ready()
        answer = stage.controller.submit(generation(max_tokens=900))
        await stage.controller.drain(0.02)
        *_, end = [event async for event in answer]
        assert isinstance(end, Ended)
        assert (end.code, end.status) == ("shutting_down", 503)

    play(act)


def test_workers_that_do_not_stop_are_killed() -> None:
    async def act(stage: Stage) -> None:
        await stage.ready()
        stage.world.worker(1).stopped = True
        await stage.controller.stop()
        assert stage.world.worker(0).signals == []
        assert stage.world.worker(1).signals == ["kill"]

    play(act)


def test_the_death_of_all_is_raised_with_its_first_cause() -> None:
    async def act(stage: Stage) -> None:
        stage.world.auto_ready = False

        def fail() -> None:
            for worker in stage.world.alive() if stage.world.started else ():
                worker.fail(FailureKind.UNSUPPORTED_MODEL, "no attention here", 6)

        stage.on_turn = fail
        with pytest.raises(ServiceDeadError, match="no attention here") as dead:
            await stage.controller.watch()
        assert dead.value.kind is FailureKind.UNSUPPORTED_MODEL
        assert stage.controller.state().status is ServiceStatus.DEAD

    play(act)


def test_a_cause_outside_the_workers_ends_the_service_with_its_words() -> None:
    async def act(stage: Stage) -> None:
        await stage.ready()
        stage.controller.give_up("ssh to mac2 failed", FailureKind.CONFIG)
        with pytest.raises(ServiceDeadError, match=r"^ssh to mac2 failed$") as dead:
            await stage.controller.watch()
        assert dead.value.kind is FailureKind.CONFIG

    play(act)


def test_an_internal_error_ends_the_service_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(stage: Stage) -> None:
        await stage.ready()

        def broken() -> list:
            raise ZeroDivisionError("a bug")

        stage.world.drain = broken
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await stage.controller.watch()
        del stage.world.drain

    play(act)


@pytest.mark.parametrize("call", ["submit", "cancel"])
def test_a_bug_in_a_call_ends_the_service_too(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def act(stage: Stage) -> None:
        await stage.ready()
        if call == "submit":
            monkeypatch.setattr(RequestLifecycle, "submit", broken)
            with pytest.raises(ZeroDivisionError):
                stage.controller.submit(generation())
        else:
            answer = stage.controller.submit(generation(max_tokens=900))
            monkeypatch.setattr(RequestLifecycle, "cancel", broken)
            with pytest.raises(ZeroDivisionError):
                answer.cancel()
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await stage.controller.watch()

    play(act)


def test_a_bug_at_the_exit_of_a_process_ends_the_service_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def act(stage: Stage) -> None:
        await stage.ready()
        with monkeypatch.context() as patched:
            patched.setattr(FailureDomains, "domain_of", broken)
            with pytest.raises(ZeroDivisionError):
                stage.world.worker(0).die(-9)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await stage.controller.watch()

    play(act)


def test_stopping_before_anything_is_up_leaves_no_process() -> None:
    async def act(stage: Stage) -> None:
        stage.world.cut.update(worker.identity for worker in stage.world.workers)
        await stage.controller.stop()
        await stage.controller.stop()

    play(act)


def test_limits_follow_the_options() -> None:
    limits = control_limits(
        WorkerOptions(
            heartbeat_interval_s=0.2,
            hang_timeout_s=3.0,
            max_restarts=9,
            restart_window_s=7.0,
            restart_delay_s=0.1,
        )
    )
    assert limits.liveness.heartbeat_interval_s == 0.2
    assert limits.liveness.hang_timeout_s == 3.0
    assert limits.supervisor.restart.max_restarts == 9
    assert limits.supervisor.restart.window_s == 7.0
    assert limits.supervisor.restart.first_delay_s == 0.1


def test_an_unknown_policy_is_refused_at_once() -> None:
    world = World()
    options = serve_options(queue=QueueOptions(load_balance_method="luck"))
    with pytest.raises(ConfigError, match="luck"):
        Controller(options, ControlPorts(world, world), rng=random.Random(0))
