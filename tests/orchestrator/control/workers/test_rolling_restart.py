"""Requested restarts: one group after another, and no request fails."""

import pytest

from mlx_dp.orchestrator.api import RETRY_ABSENT_S, OverloadedError, ServiceStatus, WorkerStatus
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.options import QueueOptions, ServeOptions
from mlx_dp.orchestrator.worker_states import RestartRefusedError
from mlx_dp.proto.messages.commands import Submit
from mlx_dp.proto.messages.events import FailureKind, FinishReason
from tests.support.control.control_world import Reader, World, serve_options
from tests.support.control.fake_worker import expected, generation


def submit(world: World, seed: int, max_tokens: int = 40) -> Reader:
    return Reader(world.core.submit(generation(seed=seed, max_tokens=max_tokens)))


def pids(world: World) -> list[int]:
    return [world.worker(index).pid for index in range(len(world.core.supervisor.workers))]


def roll(world: World, seconds: float = 10.0, *, turns: bool = True) -> None:
    """Let time pass, loops run, and successors start, while all invariants are checked."""
    for _ in range(round(seconds * 10)):
        world.pass_time(0.1)
        world.greet()
        if turns:
            world.run_workers()
        else:
            world.settle()


def ends_whole(reader: Reader, seed: int, max_tokens: int = 40) -> None:
    assert reader.read().ended is not None
    assert reader.ended.reason is FinishReason.LENGTH
    assert reader.ids == expected(generation(seed=seed), max_tokens)


def test_the_requests_of_a_worker_go_on_elsewhere_and_it_is_replaced() -> None:
    world = World().bring_up()
    readers = [submit(world, seed, 200) for seed in range(2)]
    world.run_workers(3)
    before = pids(world)
    assert world.core.restarts.request(0) == (0,)
    roll(world, 0.3)
    assert world.workers[0].draining
    assert not world.workers[0].alive
    assert world.workers[0].signals == []
    assert {reader.read().grants[-1].dp_rank for reader in readers} == {1}
    roll(world, 3.0)
    assert pids(world) == [before[0] + 2, before[1]]
    assert not world.core.restarts.under_way
    roll(world, 25.0)
    for seed, reader in enumerate(readers):
        ends_whole(reader, seed, 200)
    record = world.core.supervisor.workers[0]
    assert (record.status, record.epoch, record.last_cause) == (
        WorkerStatus.READY,
        1,
        "restarted on request",
    )


def test_it_is_neither_a_death_nor_an_attempt_and_costs_no_budget() -> None:
    world = World().bring_up()
    reader = submit(world, 0, 900)
    for _ in range(8):
        world.run_workers(2)
        world.core.restarts.request_all()
        roll(world, 3.0)
        assert not world.core.restarts.under_way
    counters = world.core.counters
    assert reader.read().ended is None
    assert counters.worker_deaths == 0
    assert counters.losses == {"restart": 16}
    assert counters.worker_restarts == 16
    domain = world.core.supervisor.domains.domain_of(0)
    assert domain.budget.used(world.clock.now) == 0


def test_all_are_replaced_one_after_another_and_no_request_fails() -> None:
    world = World(serve_options(3)).bring_up()
    before = pids(world)
    readers: list[Reader] = []
    assert world.core.restarts.request_all() == (0, 1, 2)
    fewest = 3
    for _ in range(60):
        readers.append(submit(world, len(readers), 8))
        roll(world, 0.2)
        ready = [w for w in world.core.supervisor.workers if w.status is WorkerStatus.READY]
        fewest = min(fewest, len(ready))
    roll(world, 20.0)
    assert fewest == 2, "never two at a time"
    assert not set(pids(world)) & set(before)
    for seed, reader in enumerate(readers):
        ends_whole(reader, seed, 8)


def test_one_that_is_alone_finishes_what_it_can_before_it_goes() -> None:
    world = World(serve_options(1)).bring_up()
    reader = submit(world, 0, 20)
    world.run_workers(2)
    world.core.restarts.request(0)
    roll(world, 1.0)
    assert world.workers[0].alive
    waiting = submit(world, 1)
    roll(world, 1.5)
    ends_whole(reader, 0, 20)
    assert [grant.dp_rank for grant in reader.grants] == [0]
    roll(world, 6.0)
    ends_whole(waiting, 1)
    assert len(world.workers) == 2


ALONE = [serve_options(1), serve_options(2, group=True)]


@pytest.mark.parametrize("options", ALONE, ids=["replica", "group"])
def test_whatever_is_asked_of_one_that_is_alone_waits_for_its_successor(
    options: ServeOptions,
) -> None:
    world = World(options).bring_up()
    readers = [submit(world, 0)]
    world.run_workers(2)
    before = pids(world)
    world.core.restarts.request(0)
    world.auto_ready = False
    statuses = set()
    for _ in range(60):
        roll(world, 0.1)
        statuses.add(world.core.status())
        readers.append(submit(world, len(readers), 8))
    pinned = Reader(world.core.submit(generation(seed=99, max_tokens=8, rank=0)))
    assert statuses == {ServiceStatus.RESTARTING}
    assert all(owner.restarting for owner in world.core.views.owners())
    assert not set(pids(world)) & set(before)
    world.auto_ready = True
    for worker in world.alive():
        worker.become_ready()
    roll(world, 40.0)
    assert world.core.status() is ServiceStatus.READY
    assert not any(owner.restarting for owner in world.core.views.owners())
    ends_whole(readers[0], 0)
    for seed, reader in enumerate(readers[1:], 1):
        ends_whole(reader, seed, 8)
    ends_whole(pinned, 99, 8)
    assert world.core.counters.requests_refused.total() == 0


def test_what_may_only_go_to_one_that_is_replaced_waits_for_its_successor() -> None:
    world = World().bring_up()
    world.core.restarts.request(1)
    world.auto_ready = False
    roll(world, 1.0)
    assert world.core.status() is ServiceStatus.READY
    pinned = Reader(world.core.submit(generation(max_tokens=8, rank=1)))
    roll(world, 1.0)
    assert not pinned.read().grants
    world.worker(1).become_ready()
    roll(world, 3.0)
    ends_whole(pinned, 0, 8)
    assert [grant.dp_rank for grant in pinned.grants] == [1]


def test_the_wait_for_a_successor_is_bounded_in_number_and_in_time() -> None:
    queue = QueueOptions(max_queued_requests=3, queue_timeout_s=20.0)
    world = World(serve_options(1, queue=queue)).bring_up()
    world.core.restarts.request(0)
    world.auto_ready = False
    roll(world, 1.0)
    readers = [submit(world, seed) for seed in range(3)]
    with pytest.raises(OverloadedError, match="full: 3 of 3 requests queued") as refused:
        submit(world, 3)
    assert refused.value.status == 429
    roll(world, 21.0)
    ends = [reader.read().ended for reader in readers]
    assert [end and (end.code, end.status) for end in ends] == [("queue_timeout", 503)] * 3


def test_a_successor_that_dies_once_is_waited_for_further() -> None:
    world = World(serve_options(1)).bring_up()
    world.core.restarts.request(0)
    world.auto_ready = False
    roll(world, 1.0)
    reader = submit(world, 0)
    world.worker(0).die(-11)
    roll(world, 0.2)
    late = submit(world, 1)
    world.auto_ready = True
    roll(world, 10.0)
    ends_whole(reader, 0)
    ends_whole(late, 1)


def test_a_successor_of_the_only_one_that_fails_ends_what_waits_with_the_cause() -> None:
    world = World(serve_options(1)).bring_up()
    world.core.restarts.request(0)
    world.auto_ready = False
    roll(world, 1.0)
    readers = [submit(world, 0), Reader(world.core.submit(generation(rank=0)))]
    world.worker(0).fail(FailureKind.CONFIG, "the model is gone")
    world.pass_time(0.1)
    for reader in readers:
        end = reader.read().ended
        assert end is not None and end.status == 503
        assert "the model is gone" in end.message
    assert world.core.status() is ServiceStatus.DEAD
    with pytest.raises(OverloadedError, match="all workers have failed"):
        submit(world, 1)


def test_no_request_waits_for_one_of_several_whose_successor_failed() -> None:
    world = World().bring_up()
    world.core.restarts.request(0)
    world.auto_ready = False
    roll(world, 1.0)
    world.worker(0).fail(FailureKind.CONFIG, "the model is gone")
    world.clock.now += 0.03
    world.core.settle_exits()
    assert world.core.supervisor.workers[0].status is WorkerStatus.FAILED
    with pytest.raises(OverloadedError, match="owner 0 is not ready"):
        world.core.submit(generation(rank=0))


@pytest.mark.parametrize("options", ALONE, ids=["replica", "group"])
def test_one_that_is_alone_and_lost_is_not_waited_for(options: ServeOptions) -> None:
    world = World(options).bring_up()
    world.worker(0).die(-9)
    world.pass_time(0.1)
    assert world.core.status() is ServiceStatus.STARTING
    for rank in (None, 0):
        with pytest.raises(OverloadedError) as refused:
            world.core.submit(generation(rank=rank))
        assert (refused.value.status, refused.value.retry_after_s) == (503, RETRY_ABSENT_S)


def test_what_outlasts_the_bound_waits_for_the_successor() -> None:
    limits = ControlLimits(restart_drain_s=2.0)
    world = World(serve_options(1), limits=limits).bring_up()
    reader = submit(world, 0, 60)
    world.run_workers(2)
    world.core.restarts.request(0)
    roll(world, 1.9)
    assert world.workers[0].alive
    roll(world, 8.0)
    ends_whole(reader, 0, 60)
    assert [grant.dp_rank for grant in reader.grants] == [0, 0]
    assert len(world.workers) == 2


@pytest.mark.parametrize("drain_s", [0.5, 30.0])
def test_a_group_is_replaced_as_one_under_a_new_epoch(drain_s: float) -> None:
    limits = ControlLimits(restart_drain_s=drain_s)
    world = World(serve_options(2, group=True), limits=limits).bring_up()
    readers = [submit(world, seed) for seed in range(2)]
    world.run_workers(2)
    assert world.core.restarts.request(1) == (0, 1)
    roll(world, 12.0)
    assert [worker.epoch for worker in world.core.supervisor.workers] == [1, 1]
    assert len(world.workers) == 4
    assert world.core.counters.worker_deaths == 0
    for seed, reader in enumerate(readers):
        ends_whole(reader, seed)


def test_a_second_one_is_refused_while_the_first_is_under_way() -> None:
    world = World().bring_up()
    world.core.restarts.request(0)
    for ask in (lambda: world.core.restarts.request(1), world.core.restarts.request_all):
        with pytest.raises(RestartRefusedError, match="under way"):
            ask()
    roll(world, 3.0)
    assert world.core.restarts.request(1) == (1,)


def test_a_worker_that_is_not_ready_is_refused_and_left_out_of_all() -> None:
    world = World().bring_up()
    world.worker(0).die(-9)
    world.core.settle_exits()
    world.pass_time(0.1)
    with pytest.raises(RestartRefusedError, match="worker 0 is lost"):
        world.core.restarts.request(0)
    assert world.core.restarts.request_all() == (1,)


def test_no_worker_is_taken_down_while_another_is_missing() -> None:
    world = World().bring_up()
    world.worker(0).die(-9)
    world.pass_time(0.1)
    world.core.restarts.request(1)
    world.auto_ready = False
    roll(world, 5.0)
    assert world.worker(1).alive
    world.worker(0).become_ready()
    world.auto_ready = True
    roll(world, 3.0)
    assert not world.workers[1].alive
    assert world.core.supervisor.workers[1].status is WorkerStatus.READY


def test_a_worker_whose_machine_never_came_holds_up_no_restart() -> None:
    world = World(serve_options(3))
    world.core.supervisor.set_hosts(lambda index: None if index == 1 else "")
    world.bring_up()
    before = world.worker(0).pid
    assert world.core.restarts.request(0) == (0,)
    roll(world, 3.0)
    assert world.worker(0).pid != before
    assert not world.core.restarts.under_way
    assert world.core.restarts.request_all() == (0, 2)


def test_one_that_loses_its_machine_while_it_is_replaced_holds_up_no_further_one() -> None:
    world = World(serve_options(3))
    machines: dict[int, str | None] = {0: "mac"}
    world.core.supervisor.set_hosts(lambda index: machines.get(index, ""))
    world.bring_up()
    before = world.worker(1).pid
    world.core.restarts.request_all()
    world.pass_time(0.1)
    machines[0] = None
    world.core.supervisor.set_hosts(lambda index: machines.get(index, ""))
    roll(world, 6.0)
    assert world.core.supervisor.workers[0].status is WorkerStatus.STARTING
    assert world.worker(1).pid != before
    assert not world.core.restarts.under_way
    machines[0] = "another mac"
    world.core.supervisor.set_hosts(lambda index: machines.get(index, ""))
    roll(world, 3.0)
    assert world.core.supervisor.workers[0].status is WorkerStatus.READY


def test_one_that_was_replaced_meanwhile_is_left_alone() -> None:
    world = World().bring_up()
    world.core.restarts.request_all()
    world.pass_time(0.1)
    world.worker(1).die(-9)
    roll(world, 5.0)
    assert not world.core.restarts.under_way
    assert sorted(worker.index for worker in world.workers) == [0, 0, 1, 1]
    assert [w.last_cause.split()[0] for w in world.core.supervisor.workers] == [
        "restarted",
        "killed",
    ]


def test_a_successor_that_fails_for_good_ends_it_and_the_others_serve_on() -> None:
    world = World(serve_options(3)).bring_up()
    world.core.restarts.request_all()
    world.auto_ready = False
    roll(world, 1.0)
    world.worker(0).fail(FailureKind.CONFIG, "the model is gone")
    roll(world, 5.0)
    statuses = [worker.status for worker in world.core.supervisor.workers]
    assert statuses == [WorkerStatus.FAILED, WorkerStatus.READY, WorkerStatus.READY]
    assert not world.core.restarts.under_way
    assert len(world.workers) == 4
    assert world.core.status() is ServiceStatus.READY


def test_one_that_dies_while_it_drains_is_replaced_as_any_other() -> None:
    world = World(serve_options(1)).bring_up()
    reader = submit(world, 0)
    world.run_workers(2)
    world.core.restarts.request(0)
    world.pass_time(0.1)
    world.worker(0).die(-9)
    roll(world, 8.0)
    ends_whole(reader, 0)
    assert len(world.workers) == 2
    assert not world.core.restarts.under_way
    assert world.core.counters.worker_deaths == 1


def test_one_that_does_not_go_is_killed() -> None:
    world = World().bring_up()
    world.core.restarts.request(0)
    world.pass_time(0.1)
    world.worker(0).stopped = True
    roll(world, 4.9)
    assert world.workers[0].signals == []
    roll(world, 2.0)
    assert world.workers[0].signals == ["kill"]
    assert world.core.supervisor.workers[0].status is WorkerStatus.READY


def test_a_drained_worker_is_sent_nothing_more() -> None:
    world = World(serve_options(1)).bring_up()
    submit(world, 0, 900)
    world.run_workers(2)
    world.core.restarts.request(0)
    world.pass_time(0.2)
    world.run_workers()
    submit(world, 1)
    assert not [message for message in world.worker(0).commands if isinstance(message, Submit)]


def test_a_service_that_ends_replaces_no_worker() -> None:
    world = World(serve_options(1)).bring_up()
    submit(world, 0, 900)
    world.core.restarts.request(0)
    world.pass_time(0.2)
    world.core.restarts.stop()
    roll(world, 40.0)
    assert len(world.workers) == 1
    with pytest.raises(RestartRefusedError, match="shutting down"):
        world.core.restarts.request(0)
