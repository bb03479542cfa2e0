"""The flags and environment of remote workers."""

from pathlib import Path

import pytest

from mlx_dp.orchestrator.cli.remote_workers import mlx_launch
from mlx_dp.orchestrator.config.flags import HttpFlags, RemoteFlags
from mlx_dp.orchestrator.config.remote_plan import RemotePlan
from mlx_dp.orchestrator.process.remote.host_file import Host
from tests.support.control.flag_values import flags


@pytest.mark.parametrize("no_caffeinate", [False, True])
def test_the_hosts_may_sleep_where_the_controller_may(no_caffeinate: bool) -> None:
    given = flags(
        http=HttpFlags(no_caffeinate=no_caffeinate), remote=RemoteFlags(hostfile=Path("hosts"))
    )
    plan = RemotePlan(hosts=(Host(ssh="a", ips=("10.0.0.1",)),), launch=True)
    launch = mlx_launch(given, plan, "tcp://10.0.0.1:2")
    assert launch is not None
    assert ("--no-caffeinate" in launch.command) is no_caffeinate
