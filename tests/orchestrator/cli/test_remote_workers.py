"""The flags and environment of remote workers."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_dp.orchestrator.cli.remote_workers import connect_hint, mlx_launch, worker_arguments
from mlx_dp.orchestrator.config.flags import Flags, HttpFlags, OwnerFlags, RemoteFlags
from mlx_dp.orchestrator.config.remote_plan import RemotePlan
from mlx_dp.orchestrator.process.remote.host_file import Host
from tests.support.control.flag_values import FAKE_MODEL, flags

ENDPOINT = "tcp://10.0.0.1:7801"


@pytest.mark.parametrize("no_caffeinate", [False, True])
def test_the_hosts_may_sleep_where_the_controller_may(no_caffeinate: bool) -> None:
    given = flags(
        http=HttpFlags(no_caffeinate=no_caffeinate), remote=RemoteFlags(hostfile=Path("hosts"))
    )
    plan = RemotePlan(hosts=(Host(ssh="a", ips=("10.0.0.1",)),), launch=True)
    launch = mlx_launch(given, plan, "tcp://10.0.0.1:2")
    assert launch is not None
    assert ("--no-caffeinate" in launch.command) is no_caffeinate


def test_each_rank_has_a_line_that_can_be_pasted(tmp_path: Path) -> None:
    keys = tmp_path / "my keys"
    given = flags(remote=RemoteFlags(remote_workers=2, keys=keys))
    first, *commands = connect_hint(given, RemotePlan(ranks=frozenset({1, 2})), ENDPOINT)
    assert first.endswith("paste one of these (--keys: where its own keys lie):")
    for rank, command in zip((1, 2), commands, strict=True):
        program, *arguments = shlex.split(command)
        assert Path(program).is_absolute()
        assert arguments[:3] == ["worker", "--rank", str(rank)]
        assert arguments[3:] == ["--controller", ENDPOINT, "--keys", str(keys)]


def test_relative_keys_are_given_where_they_lie() -> None:
    given = flags(remote=RemoteFlags(remote_workers=1, keys=Path("keys")))
    assert worker_arguments(given, RemotePlan(), ENDPOINT)[-1] == str(Path.cwd() / "keys")


def test_what_differs_from_the_defaults_comes_along() -> None:
    given = Flags(
        model=replace(FAKE_MODEL, trust_remote_code=True),
        owners=OwnerFlags(mem_fraction_static=0.5),
        queue=flags().queue,
        http=HttpFlags(log_level="debug"),
        fake=flags().fake,
        remote=RemoteFlags(),
    )
    assert worker_arguments(given, RemotePlan(), ENDPOINT)[2:] == [
        *("--mem-fraction-static", "0.5", "--log-level", "debug", "--trust-remote-code")
    ]


def test_two_ranks_of_one_host_share_its_device() -> None:
    plan = RemotePlan(hosts=(Host(ssh="a", ips=("1.1.1.1",)),) * 2)
    assert worker_arguments(flags(), plan, ENDPOINT)[2:] == ["--mem-fraction-static", "0.4"]


def test_an_endpoint_on_every_address_is_given_by_one_that_can_be_called() -> None:
    for everywhere in ("tcp://0.0.0.0:7801", "tcp://*:7801", "tcp://[::]:7801"):
        _, endpoint = worker_arguments(flags(), RemotePlan(), everywhere)
        assert endpoint.endswith(":7801")
        assert endpoint != everywhere
        assert endpoint.removeprefix("tcp://").removesuffix(":7801")


def test_hosts_that_are_launched_need_no_command() -> None:
    plan = RemotePlan(hosts=(Host(ssh="a"), Host(ssh="b")), launch=True, ranks=frozenset({0, 1}))
    (line,) = connect_hint(flags(), plan, ENDPOINT)
    assert line == f"mlx-dp: ranks are started over ssh, and connect to {ENDPOINT}: a, b"
