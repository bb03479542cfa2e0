"""Workers on other machines: when they may start, and the meaning of their ends."""

import random

import pytest

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.control.workers.actions import GiveUp, Spawn
from mlx_dp.orchestrator.control.workers.supervisor import Supervisor, SupervisorLimits
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.exit_codes import ExitCode

HERE = ""


class Machines(dict[int, str | None]):
    """Where each worker has a place."""

    def __call__(self, index: int) -> str | None:
        return self.get(index, HERE)


@pytest.fixture
def machines() -> Machines:
    return Machines()


def supervisor(machines: Machines, size: int = 2, *, group: bool = False) -> Supervisor:
    mode = ReplicaMode.DP_ATTENTION if group else ReplicaMode.DATA_PARALLEL
    made = Supervisor(size, mode, SupervisorLimits(), random.Random(0))
    made.set_hosts(machines)
    return made


def spawned(steps: list) -> list[int]:
    return [step.index for step in steps if isinstance(step, Spawn)]


def rise(made: Supervisor, index: int, now: float) -> list[int]:
    """Bring a worker up; return the ranks that then started."""
    followed = made.on_spawned(index, 100 + index, now)
    made.on_hello(index, now)
    return spawned([*followed, *made.on_ready(index, now)])


def test_a_worker_without_a_machine_waits_for_one_and_delays_no_other(machines) -> None:
    machines[0] = None
    made = supervisor(machines)
    assert spawned(made.start(0.0)) == [1]
    assert rise(made, 1, 1.0) == []
    assert spawned(made.tick(3600.0)) == []
    assert made.workers[0].status is WorkerStatus.STARTING
    machines[0] = "mac2"
    made.set_hosts(machines)
    assert spawned(made.tick(3601.0)) == [0]
    assert rise(made, 0, 3602.0) == []


def test_machines_do_not_wait_for_each_other_and_workers_of_one_do(machines) -> None:
    machines.update({1: "mac2", 2: "mac2"})
    made = supervisor(machines, 3)
    assert spawned(made.start(0.0)) == [0]
    assert spawned(made.on_spawned(0, 100, 0.0)) == [1]
    assert spawned(made.on_spawned(1, 101, 0.0)) == []
    made.on_hello(1, 0.5)
    assert spawned(made.on_ready(1, 1.0)) == [2]


def test_a_group_starts_once_each_of_its_ranks_has_a_machine(machines) -> None:
    machines.update({0: "mac1", 1: None})
    made = supervisor(machines, group=True)
    assert spawned(made.start(0.0)) == []
    machines[1] = "mac2"
    made.set_hosts(machines)
    assert spawned(made.tick(1.0)) == [0]
    assert spawned(made.on_spawned(0, 100, 1.0)) == [1]


def test_a_lost_machine_costs_a_restart_that_waits_for_the_next(machines) -> None:
    machines[1] = "mac2"
    made = supervisor(machines)
    made.start(0.0)
    rise(made, 0, 0.0)
    rise(made, 1, 0.0)
    machines[1] = None
    made.set_hosts(machines)
    made.on_exit(1, ExitCode.HOST_LOST, 10.0)
    assert "host_lost" in made.workers[1].last_cause
    assert spawned(made.tick(1000.0)) == []
    machines[1] = "mac3"
    made.set_hosts(machines)
    assert spawned(made.tick(1001.0)) == [1]


@pytest.mark.parametrize("group", [False, True])
def test_however_often_machines_come_and_go_the_worker_is_not_given_up(machines, group) -> None:
    machines.update({0: "mac1", 1: "mac2"})
    made = supervisor(machines, group=group)
    made.start(0.0)
    for turn in range(20):
        made.on_spawned(0, 100, 10.0 * turn)
        made.on_spawned(1, 101, 10.0 * turn)
        for index, status in ((1, ExitCode.HOST_LOST), (0, ExitCode.HOST_LOST)):
            # As the core notes it, before it is settled.
            made.domains.domain_of(index).exits.setdefault(index, status)
            made.on_exit(index, status, 10.0 * turn + 1.0)
        assert {each.status for each in made.workers} == {WorkerStatus.LOST}
        assert spawned(made.tick(10.0 * turn + 2.0))


@pytest.mark.parametrize("status", [ExitCode.CONFIG, ExitCode.UNSUPPORTED_MODEL])
def test_what_fails_on_another_machine_does_not_end_the_service(machines, status) -> None:
    machines[1] = "mac2"
    made = supervisor(machines)
    made.start(0.0)
    made.on_spawned(0, 100, 0.0)
    made.on_spawned(1, 101, 0.0)
    machines[1] = None
    made.set_hosts(machines)
    steps = made.on_exit(1, status, 1.0)
    assert not any(isinstance(step, GiveUp) for step in steps)
    assert made.workers[0].status is WorkerStatus.STARTING
    assert made.workers[1].status is WorkerStatus.LOST
