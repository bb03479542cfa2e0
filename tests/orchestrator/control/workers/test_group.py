"""A group under its controller: its addresses, late ranks, blame for losses, its end."""

from itertools import permutations

import pytest

from mlx_dp.orchestrator.api import ServiceStatus, WorkerStatus
from mlx_dp.orchestrator.control.workers.actions import RemoveOwner
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.events import FailureKind, WorkerPhase
from tests.support.control.control_world import Reader, World, serve_options
from tests.support.control.fake_worker import FakeWorker, expected, generation


def group(size: int = 2) -> World:
    return World(serve_options(size, group=True))


def begun(size: int = 2, *, say_hello: bool = True) -> World:
    """All processes are up, and no rank is ready."""
    world = group(size)
    world.auto_ready = False
    world.core.begin()
    if say_hello:
        world.greet()
        world.settle()
    return world


def enter(worker: FakeWorker, phase: WorkerPhase) -> None:
    worker.send_heartbeat(phase=phase)
    worker.world.core.on_arrival()


def wait(world: World, seconds: float) -> None:
    world.pass_time(seconds, heartbeats=False)


def wait_for_loss(world: World, within_s: float) -> str:
    """Return the cause of the loss of the first worker to blame."""
    lost = watch_losses(world)
    for _ in range(round(within_s * 10)):
        wait(world, 0.1)
        if lost:
            return next(f"{gone.index}: {gone.loss.detail}" for gone in lost if gone.culprit)
    raise AssertionError("no worker was lost")


def watch_losses(world: World) -> list[RemoveOwner]:
    lost: list[RemoveOwner] = []
    core = world.core
    told = core.owner_lost

    def owner_lost(gone: RemoveOwner, grants: tuple) -> None:
        lost.append(gone)
        told(gone, grants)

    core.owner_lost = owner_lost
    return lost


def places(world: World) -> list:
    return [worker.start.group for worker in world.workers if worker.start is not None]


def test_no_rank_loads_before_all_are_up_and_all_get_the_same_places() -> None:
    world = begun(3, say_hello=False)
    assert [worker.index for worker in world.workers] == [0, 1, 2]
    for worker in world.workers[:2]:
        worker.hello()
    world.settle()
    assert places(world) == []
    world.workers[2].hello()
    world.settle()
    world.settle()
    assert [place.rank for place in places(world)] == [0, 1, 2]
    assert {(place.size, place.generation, place.addresses) for place in places(world)} == {
        (3, 0, ("host:10", "host:11", "host:12"))
    }


def test_a_replica_is_in_no_group() -> None:
    world = World(serve_options(2)).bring_up()
    assert places(world) == [None, None]
    assert world.meetings == []


def test_every_start_has_a_generation_and_addresses_of_its_own() -> None:
    world = group().bring_up()
    world.worker(1).die(-9)
    world.recover()
    assert world.core.status() is ServiceStatus.READY
    assert world.meetings == [0, 1]
    before, after = places(world)[0], places(world)[-1]
    assert (before.generation, after.generation) == (0, 1)
    assert not {*before.addresses, *before.peers} & {*after.addresses, *after.peers}


def test_a_group_that_cannot_meet_is_tried_again_at_other_places() -> None:
    world = begun()
    for worker in world.workers:
        enter(worker, WorkerPhase.FORMING)
    world.workers[0].fail(FailureKind.PEER_LOST, "the port is taken", ExitCode.PEER_LOST)
    world.auto_ready = True
    world.recover()
    assert world.core.status() is ServiceStatus.READY
    assert world.meetings == [0, 1]
    assert world.workers[1].signals == ["kill"]


def test_a_group_that_never_meets_is_given_up_like_any_start() -> None:
    world = begun()
    for _ in range(40):
        for worker in world.alive():
            enter(worker, WorkerPhase.FORMING)
            worker.fail(FailureKind.PEER_LOST, "the port is taken", ExitCode.PEER_LOST)
        world.recover(5.0)
    assert world.core.status() is ServiceStatus.DEAD
    assert world.meetings == [0, 1, 2, 3, 4, 5]
    assert "the port is taken (5 restarts did not help)" in world.core.supervisor.cause.detail


def test_without_addresses_the_start_is_tried_again() -> None:
    world = group()
    world.no_addresses = True
    world.core.begin()
    world.greet()
    world.settle()
    assert [worker.signals for worker in world.workers] == [["kill"], ["kill"]]
    world.no_addresses = False
    world.recover()
    assert world.core.status() is ServiceStatus.READY


def test_a_rank_without_hello_is_behind() -> None:
    world = begun(say_hello=False)
    world.workers[0].hello()
    world.settle()
    assert wait_for_loss(world, 61.0) == "1: no hello after 60 s"


def test_a_rank_that_is_silent_after_its_start_is_behind() -> None:
    world = begun()
    enter(world.workers[0], WorkerPhase.FORMING)
    said = wait_for_loss(world, 61.0)
    assert said.startswith("1: the group has not formed after 60 s")
    assert said.endswith("waiting for rank 1 of 2 (last reported phase: none)")


def test_time_to_meet_counts_from_the_last_one_to_come() -> None:
    world = begun()
    enter(world.workers[0], WorkerPhase.FORMING)
    wait(world, 50.0)
    enter(world.workers[1], WorkerPhase.FORMING)
    wait(world, 50.0)
    assert len(world.alive()) == 2
    lost = wait_for_loss(world, 11.0)
    assert "waiting for rank 0, 1 of 2 (last reported phase: forming)" in lost


def test_a_rank_that_loads_while_the_others_are_warm_is_behind() -> None:
    world = begun(3)
    for worker in world.workers:
        enter(worker, WorkerPhase.FORMING)
        enter(worker, WorkerPhase.LOADING)
    for worker in (world.workers[0], world.workers[2]):
        enter(worker, WorkerPhase.WARMING)
    wait(world, 590.0)
    assert len(world.alive()) == 3
    said = wait_for_loss(world, 11.0)
    assert said == (
        "1: the group is not ready after 600 s: this rank is the slowest "
        "(last reported phase: loading)"
    )


def test_of_those_that_cannot_meet_the_stopped_one_is_behind() -> None:
    world = begun(3)
    for worker in world.workers:
        enter(worker, WorkerPhase.FORMING)
    world.workers[2].stopped = True
    said = wait_for_loss(world, 61.0)
    assert said.startswith("2: the group has not formed after 60 s: waiting for rank 2 of 3")
    assert said.endswith("(last reported phase: forming), stopped by a signal")


def test_no_phase_twice_gives_no_more_time() -> None:
    world = begun()
    for _ in range(3):
        for worker in world.workers:
            enter(worker, WorkerPhase.LOADING)
            enter(worker, WorkerPhase.FORMING)
        wait(world, 199.0)
    assert "the group is not ready" in wait_for_loss(world, 5.0)


def test_the_others_are_killed_the_moment_one_is_gone() -> None:
    world = group(3).bring_up()
    world.worker(1).die(-9)
    world.clock.now += world.limits.exit_settle_s
    world.core.settle_exits()
    assert [worker.signals for worker in world.workers[:3]] == [["kill"], [], ["kill"]]


def test_only_what_the_culprit_ran_is_suspect() -> None:
    world = group().bring_up()
    lost = watch_losses(world)
    readers = [Reader(world.core.submit(generation((n,), 6, seed=n))) for n in range(2)]
    world.run_workers(2)
    world.worker(1).die(-11)
    wait(world, 0.1)
    assert [(gone.index, gone.culprit, gone.loss.kind) for gone in lost] == [
        (0, False, "sibling"),
        (1, True, "exit"),
    ]
    world.recover()
    world.run_workers(6)
    for n, reader in enumerate(readers):
        assert reader.read().ids == expected(generation((n,), seed=n), 6)


def test_a_rank_that_others_wait_for_is_to_blame_and_shows_its_stacks() -> None:
    world = group(3).bring_up()
    Reader(world.core.submit(generation((1,), 500)))
    world.run_workers(2)
    lost = watch_losses(world)
    for _ in range(140):
        for worker in world.workers[:2]:
            worker.send_heartbeat(awaits_rank=2)
        wait(world, 0.1)
        if lost:
            break
    blamed = {gone.index: gone.culprit for gone in lost}
    assert blamed == {0: False, 1: False, 2: True}
    assert "worker 0 waits for it" in lost[2].loss.detail
    assert [worker.signals for worker in world.workers[:3]] == [["kill"], ["kill"], ["abort"]]


def test_a_stopped_rank_is_to_blame_although_it_silences_all() -> None:
    world = group().bring_up()
    lost = watch_losses(world)
    world.worker(1).stopped = True
    wait(world, 10.5)
    assert {gone.index: gone.culprit for gone in lost} == {0: False, 1: True}
    assert "stopped by a signal" in world.core.supervisor.workers[1].last_cause


def test_a_rank_that_waits_reads_no_requests_and_is_not_to_blame_for_that() -> None:
    world = group().bring_up()
    Reader(world.core.submit(generation((1,), 50)))
    waiting = next(worker for worker in world.workers if worker.commands)
    waiting.commands.clear()
    lost = watch_losses(world)
    while not lost:
        for worker in world.alive():
            worker.send_heartbeat(awaits_rank=1 - waiting.index if worker is waiting else None)
        wait(world, 0.1)
    assert {gone.index: gone.culprit for gone in lost} == {
        waiting.index: False,
        1 - waiting.index: True,
    }
    assert world.workers[1 - waiting.index].signals == ["abort"]


@pytest.mark.parametrize("named", [True, False])
def test_one_that_lost_a_peer_is_not_to_blame(named: bool) -> None:
    world = group().bring_up()
    lost = watch_losses(world)
    world.workers[0].lose_peer(1 if named else None)
    world.core.on_arrival()
    # Its peer may have exited, which is seen a moment later.
    wait(world, 0.4)
    assert not lost
    assert not any(owner.takes_requests for owner in world.core.ranks.owners())
    wait(world, 0.2)
    assert {gone.index: gone.culprit for gone in lost} == {0: False, 1: named}
    assert world.workers[0].signals == ["kill"]
    # The stacks of a rank that does not answer show the reason.
    assert world.workers[1].signals == (["abort"] if named else ["kill"])


KILLED = ("rank 2 exits",)
TOLD = ("rank 0 names 2", "rank 0 exits", "rank 1 names 0", "rank 1 exits")


def _happens(world: World, event: str) -> None:
    match event:
        case "rank 2 exits":
            world.workers[2].die(-9)
        case "rank 0 names 2":
            world.workers[0].lose_peer(2)
        case "rank 1 names 0":
            world.workers[1].lose_peer(0)
        case "rank 0 exits":
            world.workers[0].die(ExitCode.PEER_LOST)
        case "rank 1 exits":
            world.workers[1].die(ExitCode.PEER_LOST)
    world.clock.now += 0.03
    world.core.on_arrival()
    world.core.settle_exits()


@pytest.mark.parametrize("count", range(len(TOLD) + 1))
def test_a_killed_rank_is_to_blame_in_whatever_order_its_peers_miss_it(count: int) -> None:
    for order in permutations((*KILLED, *TOLD[:count])):
        world = group(3).bring_up()
        lost = watch_losses(world)
        for event in order:
            # A process's last messages are read before its exit is settled, or never.
            _happens(world, event)
        wait(world, 0.1)
        blamed = {gone.index: gone.culprit for gone in lost}
        assert blamed == {0: False, 1: False, 2: True}, order
        cause = "killed by SIGKILL, possibly out of memory"
        assert world.core.supervisor.workers[2].last_cause == cause, order
        assert world.core.supervisor.workers[0].last_cause == f"worker 2: {cause}", order


def test_a_killed_rank_is_to_blame_where_a_request_finds_it_gone_first() -> None:
    world = group().bring_up()
    lost = watch_losses(world)
    world.cut.update(worker.identity for worker in world.workers[:2])
    reader = Reader(world.core.submit(generation((1,), 6)))
    world.workers[1].lose_peer(None)
    world.core.on_arrival()
    assert not lost
    world.workers[0].die(-9)
    wait(world, 0.1)
    assert {gone.index: gone.culprit for gone in lost} == {0: True, 1: False}
    world.cut.clear()
    world.recover()
    world.run_workers(6)
    assert reader.read().ids == expected(generation((1,)), 6)


def test_an_exit_says_more_than_reports_of_a_lost_peer() -> None:
    world = group(3).bring_up()
    lost = watch_losses(world)
    world.workers[0].lose_peer(1)
    world.workers[0].die(ExitCode.PEER_LOST)
    world.workers[2].die(-9)
    world.core.on_arrival()
    assert {gone.index: gone.culprit for gone in lost} == {0: False, 1: False, 2: True}


@pytest.mark.parametrize("stop", [True, False])
def test_a_requested_end_waits_for_no_rank_that_is_stuck_without_its_peers(
    stop: bool,
) -> None:
    world = group().bring_up()
    if stop:
        world.core.stop()
    else:
        world.core.restarts.request(0)
        wait(world, 0.3)
    world.workers[0].receive()
    wait(world, 0.9)
    assert [worker.alive for worker in world.workers[:2]] == [False, True]
    wait(world, 0.5)
    assert world.workers[1].signals == ["kill"]
    if stop:
        assert {each.status for each in world.core.supervisor.workers} == {WorkerStatus.STOPPED}
