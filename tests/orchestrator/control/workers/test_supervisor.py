"""The workers' life cycles: events in, actions out."""

import random

import pytest

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.control.state.transitions import IllegalStepError
from mlx_dp.orchestrator.control.workers.actions import (
    AddOwner,
    CloseOwner,
    Dismiss,
    DrainOwner,
    DumpStacks,
    GiveUp,
    Kill,
    Loss,
    RemoveOwner,
    SendStart,
    Spawn,
)
from mlx_dp.orchestrator.control.workers.record import NEXT
from mlx_dp.orchestrator.control.workers.supervisor import Supervisor, SupervisorLimits
from mlx_dp.orchestrator.exit_status import describe_exit, failure_of
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.events import Failed, FailureKind

HUNG = Loss(kind=LossKind.HUNG, detail="no step")
BROKEN = Loss(kind=LossKind.PROTOCOL, detail="junk")


def supervisor(size: int = 2, *, group: bool = False) -> Supervisor:
    mode = ReplicaMode.DP_ATTENTION if group else ReplicaMode.DATA_PARALLEL
    return Supervisor(size, mode, SupervisorLimits(), random.Random(0))


def up(size: int = 2, *, group: bool = False) -> Supervisor:
    made = supervisor(size, group=group)
    made.start(0.0)
    if group:
        return rise(made, 0.0)
    for index in range(size):
        made.on_spawned(index, 100 + index, 0.0)
        made.on_hello(index, 0.0)
        made.on_ready(index, 0.0)
    return made


def rise(made: Supervisor, now: float) -> Supervisor:
    """A group whose first member is being spawned becomes ready."""
    for worker in made.workers:
        made.on_spawned(worker.index, 100 + worker.index, now)
    for worker in made.workers:
        made.on_hello(worker.index, now)
    for worker in made.workers:
        made.on_ready(worker.index, now)
    return made


def failed(
    message: str, kind: FailureKind = FailureKind.INTERNAL, lost: int | None = None
) -> Failed:
    return Failed(kind=kind, message=message, lost_rank=lost)


def kinds(steps) -> list[type]:
    return [type(step) for step in steps]


def culprits(steps) -> list[int]:
    return [step.index for step in steps if isinstance(step, RemoveOwner) and step.culprit]


def due(made: Supervisor, since: float) -> tuple[float, list]:
    """Tick on until something happens."""
    for tenth in range(1, 400):
        now = since + tenth / 10
        steps = made.tick(now)
        if steps:
            return now, steps
    raise AssertionError("nothing happens")


def test_every_status_is_in_the_table() -> None:
    assert NEXT.keys() == set(WorkerStatus)


def test_an_illegal_step_names_both_sides() -> None:
    made = up()
    with pytest.raises(IllegalStepError, match="a ready worker cannot become stopped"):
        made.workers[0].change_status(WorkerStatus.STOPPED, 0.0)


def test_starts_are_staged_and_each_has_its_own_identity() -> None:
    made = supervisor()
    (first,) = made.start(0.0)
    made.on_spawned(0, 100, 0.0)
    assert isinstance(first, Spawn)
    assert first.identity.startswith("w0-")
    assert made.tick(1.0) == []
    assert made.on_hello(0, 1.0) == [SendStart(0, first.identity)]
    added, second = made.on_ready(0, 2.0)
    assert added == AddOwner(0, first.identity)
    assert isinstance(second, Spawn)
    assert second.index == 1
    assert second.identity.partition("-")[2] != first.identity.partition("-")[2]


def test_events_out_of_order_are_protocol_errors() -> None:
    made = supervisor()
    made.start(0.0)
    with pytest.raises(ProtocolError, match="ready while starting"):
        made.on_ready(0, 0.0)
    made.on_hello(0, 0.0)
    with pytest.raises(ProtocolError, match="hello while starting"):
        made.on_hello(0, 0.0)
    made.on_ready(0, 0.0)
    with pytest.raises(ProtocolError, match="ready while ready"):
        made.on_ready(0, 0.0)


@pytest.mark.parametrize("status", [0, 1, -9, -11])
def test_an_unrequested_exit_is_a_death_and_is_followed_by_a_restart(status: int) -> None:
    made = up()
    (removed,) = made.on_exit(0, status, 10.0)
    assert isinstance(removed, RemoveOwner)
    assert removed.culprit
    now, (spawn,) = due(made, 10.0)
    assert isinstance(spawn, Spawn)
    assert 10.1 <= now <= 10.3
    assert made.workers[0].restarts == 1
    assert made.workers[1].status is WorkerStatus.READY


def test_no_worker_is_restarted_before_its_old_process_is_gone() -> None:
    made = up()
    assert kinds(made.on_loss(0, BROKEN, 10.0)) == [RemoveOwner, Kill]
    assert made.tick(20.0) == []
    assert made.on_exit(0, -9, 20.0) == []
    assert kinds(due(made, 20.0)[1]) == [Spawn]


@pytest.mark.parametrize(
    "kind",
    [
        LossKind.HUNG,
        LossKind.SILENT,
        LossKind.START_TIMEOUT,
        LossKind.NOT_ACCEPTED,
        LossKind.NOT_RELEASED,
    ],
)
def test_one_that_does_nothing_writes_its_stacks_before_it_is_killed(kind: LossKind) -> None:
    made = up()
    assert kinds(made.on_loss(0, Loss(kind=kind, detail="no step"), 10.0)) == [
        RemoveOwner,
        DumpStacks,
    ]
    assert made.tick(10.9) == []
    assert kinds(made.tick(11.0)) == [Kill]


def test_one_that_says_it_failed_has_time_to_exit_by_itself() -> None:
    made = up()
    assert kinds(made.on_failed(0, failed("broke"), 10.0)) == [RemoveOwner]
    assert made.tick(11.9) == []
    assert kinds(made.tick(12.0)) == [Kill]


def test_a_second_loss_changes_nothing() -> None:
    made = up()
    made.on_loss(0, BROKEN, 10.0)
    assert made.on_loss(0, HUNG, 10.0) == []
    assert made.workers[0].message == "junk"


@pytest.mark.parametrize(
    "kind",
    [FailureKind.CONFIG, FailureKind.UNSUPPORTED_MODEL, FailureKind.OUT_OF_MEMORY],
)
def test_a_start_that_would_fail_again_is_not_repeated_and_ends_the_service(
    kind: FailureKind,
) -> None:
    made = supervisor(3)
    made.start(0.0)
    made.on_hello(0, 0.0)
    made.on_failed(0, failed("no", kind), 1.0)
    assert kinds(made.on_exit(0, 3, 1.0)) == [GiveUp] * 3
    assert made.dead
    assert made.cause is not None
    assert (made.cause.detail, made.cause.failure) == ("no", kind)


def test_the_exit_status_tells_the_same_when_no_message_came() -> None:
    made = supervisor()
    made.start(0.0)
    assert GiveUp in kinds(made.on_exit(0, ExitCode.UNSUPPORTED_MODEL, 1.0))
    assert made.dead


def test_memory_that_sufficed_once_is_tried_again() -> None:
    made = up(1)
    made.on_exit(0, ExitCode.OUT_OF_MEMORY, 10.0)
    assert kinds(due(made, 10.0)[1]) == [Spawn]
    assert not made.dead


def test_a_crash_loop_fails_with_its_last_cause_and_the_others_go_on() -> None:
    made = up()
    made.on_exit(0, -11, 10.0)
    now = 10.0
    for _ in range(5):
        now, (spawn,) = due(made, now)
        assert isinstance(spawn, Spawn)
        made.on_exit(0, 1, now)
    assert made.workers[0].status is WorkerStatus.FAILED
    cause = "exited with status 1 (crash) (5 restarts did not help)"
    assert made.workers[0].message == made.workers[0].last_cause == cause
    assert made.cause is not None
    assert made.cause.detail == cause
    assert made.workers[1].status is WorkerStatus.READY
    assert not made.dead


def test_deaths_that_lie_far_apart_never_spend_the_budget() -> None:
    made = up(1)
    now = 0.0
    for _ in range(20):
        now += 100.0
        made.on_exit(0, -9, now)
        now, (spawn,) = due(made, now)
        assert isinstance(spawn, Spawn)
        made.on_hello(0, now)
        made.on_ready(0, now)
    assert made.workers[0].restarts == 20


def test_a_failed_start_passes_the_turn_on() -> None:
    made = supervisor(2)
    made.start(0.0)
    _, spawn = made.on_exit(0, 1, 0.0)
    assert isinstance(spawn, Spawn)
    assert spawn.index == 1


def test_a_group_is_lost_and_restarted_as_one_under_a_new_epoch() -> None:
    made = up(3, group=True)
    steps = made.on_exit(1, -9, 10.0)
    assert kinds(steps) == [RemoveOwner, Kill, RemoveOwner, RemoveOwner, Kill]
    culprits = [step.culprit for step in steps if isinstance(step, RemoveOwner)]
    assert culprits == [False, True, False]
    made.on_exit(0, -9, 10.0)
    assert made.tick(11.0) == []
    made.on_exit(2, -9, 11.0)
    now, _ = due(made, 11.0)
    assert {worker.status for worker in made.workers} == {WorkerStatus.STARTING}
    rise(made, now)
    assert {worker.epoch for worker in made.workers} == {1}
    assert [worker.restarts for worker in made.workers] == [1, 1, 1]


def test_in_a_group_the_exited_rank_is_to_blame_and_not_its_first_reporter() -> None:
    made = up(3, group=True)
    # Its exit was seen, and is settled once its last messages have been read.
    made.domains.domain_of(1).exits[1] = -11
    steps = made.on_failed(0, failed("a peer is gone"), 10.0)
    assert culprits(steps) == [1]
    assert made.workers[0].last_cause == "worker 1: killed by SIGSEGV"
    made.on_exit(1, -11, 10.0)
    assert made.workers[1].last_cause == "killed by SIGSEGV"


def test_of_several_that_have_exited_the_first_is_to_blame() -> None:
    made = up(2, group=True)
    made.domains.domain_of(1).exits[1] = -11
    made.domains.domain_of(0).exits[0] = 4
    made.on_exit(1, -11, 10.0)
    assert made.workers[0].last_cause == "worker 1: killed by SIGSEGV"


def test_what_a_worker_said_before_its_exit_says_more_than_that() -> None:
    made = up(2, group=True)
    made.domains.domain_of(0).exits[0] = 4
    made.on_failed(0, failed("the device is gone"), 10.0)
    assert made.workers[0].last_cause == "the device is gone"


@pytest.mark.parametrize("group", [False, True])
def test_the_exit_explains_why_a_worker_was_not_connected(group: bool) -> None:
    made = up(2, group=group)
    missed = Loss(kind=LossKind.DISCONNECTED, detail="w1-1: not connected")
    made.on_loss(1, missed, 10.0)
    # The exit of a rank comes too late to be waited for.
    made.tick(10.6)
    if group:
        made.on_exit(0, -9, 10.7)
    made.on_exit(1, -11, 10.7)
    cause = "w1-1: not connected, killed by SIGSEGV"
    assert made.workers[1].last_cause == cause
    loss = made.domains.domain_of(1).loss
    assert loss is not None
    assert loss.detail == cause
    if group:
        assert made.workers[0].last_cause == "worker 1: w1-1: not connected"


def test_a_rank_that_is_not_connected_waits_for_its_exit() -> None:
    made = up(2, group=True)
    missed = Loss(kind=LossKind.DISCONNECTED, detail="w1-1: not connected")
    assert kinds(made.on_loss(1, missed, 10.0)) == [CloseOwner, CloseOwner]
    assert made.tick(10.4) == []
    steps = made.on_exit(1, -11, 10.4)
    assert culprits(steps) == [1]
    assert made.workers[1].last_cause == "killed by SIGSEGV"
    assert made.workers[0].last_cause == "worker 1: killed by SIGSEGV"


def test_how_a_predecessor_ended_says_nothing_of_its_successor() -> None:
    made = up(2, group=True)
    made.domains.domain_of(0).exits.update({0: -9, 1: -9})
    made.on_exit(0, -9, 10.0)
    made.on_exit(1, -9, 10.0)
    now, _ = due(made, 10.0)
    rise(made, now)
    made.domains.domain_of(1).exits[1] = -11
    made.on_failed(0, failed("a peer is gone"), now)
    assert made.workers[0].last_cause == "worker 1: killed by SIGSEGV"


@pytest.mark.parametrize("kind", [LossKind.HUNG, LossKind.SILENT])
def test_a_group_that_hangs_shows_the_stacks_of_all_and_blames_none(kind: LossKind) -> None:
    made = up(2, group=True)
    steps = made.on_loss(1, Loss(kind=kind, detail="stuck"), 10.0)
    assert kinds(steps) == [RemoveOwner, DumpStacks] * 2
    assert not any(step.culprit for step in steps if isinstance(step, RemoveOwner))
    assert kinds(made.tick(11.0)) == [Kill, Kill]


def test_a_restart_on_request_dismisses_it_and_needs_no_patience() -> None:
    made = up()
    (drained,) = made.drain(0, 10.0)
    assert drained == DrainOwner(0, made.workers[0].identity)
    assert made.workers[0].status is WorkerStatus.DRAINING
    removed, dismissed = made.retire(0, 11.0)
    assert isinstance(removed, RemoveOwner)
    assert not removed.culprit
    assert isinstance(dismissed, Dismiss)
    assert made.on_exit(0, 0, 11.5) == []
    assert kinds(made.tick(11.5)) == [Spawn]
    assert made.workers[0].epoch == 1
    assert made.workers[1].epoch == 0


def test_stopping_restarts_no_worker() -> None:
    made = up()
    made.stop(0.0)
    assert made.workers[0].status is WorkerStatus.DRAINING
    assert kinds(made.on_exit(0, 0, 10.0)) == [RemoveOwner]
    made.on_exit(1, -9, 10.0)
    assert [worker.status for worker in made.workers] == [WorkerStatus.STOPPED] * 2
    assert made.all_exited
    assert made.tick(99.0) == []
    made.stop(0.0)


def test_a_worker_that_is_ready_after_the_stop_becomes_no_owner_and_may_exit() -> None:
    made = supervisor(1)
    made.start(0.0)
    made.on_hello(0, 0.0)
    made.stop(1.0)
    assert made.on_ready(0, 2.0) == []
    assert made.workers[0].status is WorkerStatus.DRAINING
    assert kinds(made.on_exit(0, 0, 3.0)) == [RemoveOwner]
    assert made.workers[0].status is WorkerStatus.STOPPED


def test_a_kill_after_the_stop_is_ours_and_speaks_of_no_memory() -> None:
    made = up()
    made.stop(0.0)
    (removed,) = made.on_exit(0, -9, 10.0)
    assert isinstance(removed, RemoveOwner)
    assert removed.loss.detail == "killed by SIGKILL"


def test_giving_all_up_cancels_the_restarts_that_were_due() -> None:
    made = supervisor(2)
    made.start(0.0)
    made.on_exit(0, 1, 0.0)
    made.on_hello(1, 0.0)
    made.on_failed(1, failed("no good", FailureKind.CONFIG), 0.0)
    steps = made.on_exit(1, 3, 0.0)
    assert [step.index for step in steps if isinstance(step, GiveUp)] == [0, 1]
    assert made.tick(99.0) == []
    assert made.dead


def test_stopping_ends_workers_that_wait_for_a_start() -> None:
    made = supervisor(2)
    made.start(0.0)
    made.stop(0.0)
    assert made.workers[1].status is WorkerStatus.STOPPED
    assert made.on_exit(0, -15, 1.0) == [
        RemoveOwner(
            0,
            made.workers[0].identity,
            Loss(kind=LossKind.EXIT, detail="killed by SIGTERM"),
            culprit=False,
        )
    ]


def test_starts_are_not_late_by_what_the_controller_slept() -> None:
    made = supervisor(1)
    made.start(0.0)
    made.extend_deadlines(500.0, 500.0)
    assert made.tick(559.0) == []
    assert kinds(made.tick(561.0)) == [RemoveOwner, DumpStacks]


def test_what_begins_after_the_controller_awoke_gets_no_more_time_than_ever() -> None:
    made = supervisor(1)
    made.start(0.0)
    # It said hello during the sleep, which is read first.
    made.on_hello(0, 500.0)
    made.extend_deadlines(500.1, 500.0)
    assert made.tick(1100.0) == []
    assert kinds(made.tick(1101.0)) == [RemoveOwner, DumpStacks]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with status 0 (ok)"),
        (3, "exited with status 3 (config)"),
        (99, "exited with status 99"),
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL, possibly out of memory"),
        (-99, "killed by signal 99"),
    ],
)
def test_exits_are_told_in_words(status: int, words: str) -> None:
    assert describe_exit(status) == words
    assert "memory" not in describe_exit(status, expected=True)


def test_every_exit_code_has_a_failure() -> None:
    final = {code for code in ExitCode if not failure_of(code).transient}
    assert final == {code for code in ExitCode if code.would_fail_again}


def test_a_rank_is_spawned_once_the_process_of_the_one_before_is_there() -> None:
    made = supervisor(2, group=True)
    (first,) = made.start(0.0)
    assert made.tick(1.0) == []
    (second,) = made.on_spawned(0, 100, 1.0)
    assert [first.index, second.index] == [0, 1]
    assert made.on_spawned(1, 101, 1.0) == []


def test_no_rank_is_spawned_after_one_that_got_no_process() -> None:
    made = supervisor(2, group=True)
    made.start(0.0)
    assert kinds(made.on_spawn_failed(0, "no more processes", 0.0)) == [RemoveOwner]
    assert made.workers[1].status is WorkerStatus.LOST
    assert [step.index for step in due(made, 0.0)[1]] == [0]


def test_a_rank_cannot_be_ready_before_its_whole_group_is_up() -> None:
    made = supervisor(2, group=True)
    made.start(0.0)
    made.on_spawned(0, 100, 0.0)
    made.on_spawned(1, 101, 0.0)
    assert made.on_hello(0, 0.0) == []
    with pytest.raises(ProtocolError, match="ready while starting"):
        made.on_ready(0, 0.0)
    assert kinds(made.on_hello(1, 0.0)) == [SendStart, SendStart]
    made.on_ready(0, 0.0)


def test_those_that_left_since_they_lost_a_peer_are_not_the_one_that_was_lost() -> None:
    made = up(3, group=True)
    made.domains.domain_of(0).exits.update({0: int(ExitCode.PEER_LOST), 2: -9})
    steps = made.on_failed(1, failed("no answer", FailureKind.PEER_LOST), 10.0)
    assert culprits(steps) == [2]


@pytest.mark.parametrize(
    ("reports", "blamed"),
    [
        pytest.param([(0, 1)], [1], id="one names another"),
        pytest.param([(0, 2), (1, 2)], [2], id="two name the same"),
        pytest.param([(2, 0), (0, 1)], [1], id="one names another that has lost one itself"),
        pytest.param([(0, None)], [], id="one names none"),
        pytest.param([(0, None), (2, 0)], [], id="one names another that names none"),
        pytest.param([(0, 1), (1, 0)], [], id="two name each other"),
        pytest.param([(0, 1), (2, None)], [1], id="one names another, and one none"),
    ],
)
def test_without_an_exit_the_one_that_is_missed_is_to_blame(
    reports: list[tuple[int, int | None]], blamed: list[int]
) -> None:
    made = up(3, group=True)
    for at, (index, rank) in enumerate(reports):
        now = 10.0 + 0.1 * at
        report = Failed(kind=FailureKind.PEER_LOST, message="no answer", lost_rank=rank)
        assert kinds(made.on_failed(index, report, now)) == [CloseOwner] * 3
        assert made.tick(now) == []
    assert culprits(made.tick(10.5)) == blamed


def test_no_exit_is_awaited_that_would_say_nothing_more() -> None:
    made = up(2, group=True)
    made.on_failed(0, failed("no answer", FailureKind.PEER_LOST), 10.0)
    steps = made.on_failed(1, failed("no answer", FailureKind.PEER_LOST), 10.1)
    assert [kind for kind in kinds(steps) if kind is RemoveOwner] == [RemoveOwner] * 2
    assert culprits(steps) == []
    assert not made.domains.domain_of(0).reports


def test_a_restart_on_request_forgets_what_was_reported() -> None:
    made = up(2, group=True)
    made.on_failed(0, failed("no answer", FailureKind.PEER_LOST), 10.0)
    made.drain(0, 10.1)
    made.retire(0, 10.2)
    assert RemoveOwner not in kinds(made.tick(10.9))


def test_a_rank_that_is_up_waits_for_one_that_was_spawned_late() -> None:
    made = supervisor(2, group=True)
    made.start(0.0)
    made.on_spawned(0, 100, 50.0)
    made.on_spawned(1, 101, 50.0)
    made.on_hello(0, 51.0)
    assert made.tick(61.0) == []
    assert culprits(made.tick(111.0)) == [1]
