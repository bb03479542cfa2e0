"""The table of hosts, by a clock of the test's own."""

import pytest

from mlx_dp.orchestrator.process.remote.host_table import (
    HostTable,
    HostTimes,
    SendToHost,
    WorkerEnded,
)
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.host_messages import (
    Alive,
    Deny,
    Join,
    Leave,
    Ping,
    Welcome,
    WorkerExited,
)

TIMES = HostTimes(heartbeat_s=0.5, silence_s=5.0)
WELCOME = Welcome(heartbeat_s=0.5, silence_s=5.0)
TAKEN = "--rank 2 is taken by mac2 (pid 7): use another --rank, or end mlx-dp worker there"
JOIN = Join(rank=2, host="mac2", pid=7)


@pytest.fixture
def table() -> HostTable:
    return HostTable({2, 3}, TIMES)


@pytest.fixture
def running(table: HostTable) -> HostTable:
    table.handle("host-2-a", JOIN, 0.0)
    table.launched(2, "w2-a")
    return table


def test_a_host_that_joins_has_the_place_of_its_rank(table) -> None:
    assert table.record(2).link == ""
    assert table.handle("host-2-a", JOIN, 0.0) == [SendToHost("host-2-a", WELCOME)]
    assert (table.record(2).link, table.record(2).host) == ("host-2-a", "mac2")
    assert table.record(3).link == ""


def test_a_repeated_join_is_answered_again(table) -> None:
    table.handle("host-2-a", JOIN, 0.0)
    assert table.handle("host-2-a", JOIN, 0.5) == [SendToHost("host-2-a", WELCOME)]


def test_a_rank_of_ours_is_refused_for_good_and_told_which_are_free(table) -> None:
    (say,) = table.handle("host-0-a", Join(rank=0, host="mac2", pid=7), 0.0)
    reason = "--rank 0 is not for another machine: use --rank 2 or 3"
    assert say == SendToHost("host-0-a", Deny(reason=reason, final=True))


@pytest.mark.parametrize(("ranks", "said"), [({2}, "--rank 2"), ({4, 3, 2}, "--rank 2 to 4")])
def test_the_ranks_that_there_are_are_said_as_a_user_would(ranks, said) -> None:
    (say,) = HostTable(ranks, TIMES).handle("host-0-a", Join(rank=0, host="m", pid=7), 0.0)
    assert say.message.reason.endswith(f": use {said}")


def test_a_second_host_of_a_rank_may_try_again_once_the_first_is_gone(table) -> None:
    table.handle("host-2-a", JOIN, 0.0)
    (say,) = table.handle("host-2-b", JOIN, 1.0)
    assert say == SendToHost("host-2-b", Deny(reason=TAKEN, final=False))
    table.heartbeat(5.5)
    assert table.handle("host-2-b", JOIN, 6.0) == [SendToHost("host-2-b", WELCOME)]


def test_an_exit_that_is_told_counts_once_and_for_its_own_worker_alone(running) -> None:
    assert running.handle("host-2-a", WorkerExited(identity="w2-old", status=1), 1.0) == []
    exited = WorkerExited(identity="w2-a", status=-9)
    assert running.handle("host-2-a", exited, 1.0) == [WorkerEnded("w2-a", -9)]
    assert running.handle("host-2-a", exited, 1.0) == []
    running.launched(2, "w2-b")


def test_a_host_that_sends_is_pinged_and_a_silent_one_is_given_up(running) -> None:
    assert running.heartbeat(5.0) == [SendToHost("host-2-a", Ping())]
    assert running.handle("host-2-a", Alive(), 5.0) == []
    assert running.heartbeat(10.0) == [SendToHost("host-2-a", Ping())]
    assert running.heartbeat(10.1) == [WorkerEnded("w2-a", ExitCode.HOST_LOST)]
    assert running.heartbeat(10.6) == []
    assert running.record(2).link == ""


def test_a_lost_host_is_told_so_when_it_sends_again(running) -> None:
    running.heartbeat(10.0)
    (say,) = running.handle("host-2-a", Alive(), 11.0)
    assert isinstance(say.message, Deny)
    assert not say.message.final


def test_a_connection_that_is_gone_ends_what_ran_there(running) -> None:
    assert running.disconnected("host-2-b") == []
    assert running.disconnected("host-2-a") == [WorkerEnded("w2-a", ExitCode.HOST_LOST)]
    assert running.disconnected("host-2-a") == []


def test_a_host_that_leaves_ends_what_ran_there(running) -> None:
    steps = running.handle("host-2-a", Leave(reason="it was asked to stop"), 1.0)
    assert steps == [WorkerEnded("w2-a", ExitCode.HOST_LOST)]
    assert running.record(2).link == ""


def test_no_host_is_silent_because_the_controller_slept(running) -> None:
    running.reset_silence(60.0)
    assert running.heartbeat(61.0) == [SendToHost("host-2-a", Ping())]


def test_a_worker_can_be_found_by_its_host_until_it_has_ended(running) -> None:
    assert running.link_of("w2-a") == "host-2-a"
    assert running.link_of("w2-b") is None
    running.heartbeat(10.0)
    assert running.link_of("w2-a") is None
