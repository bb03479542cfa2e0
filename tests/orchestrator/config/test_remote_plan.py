import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_dp.orchestrator.config import configuration
from mlx_dp.orchestrator.config.flags import OwnerFlags, RemoteFlags
from mlx_dp.orchestrator.config.remote_plan import RemotePlan, plan_remote
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.wire.key_files import write_keys
from tests.support.control.flag_values import flags

HERE = "127.0.0.1:7801"
THREE = OwnerFlags(dp_size=3)
GROUP = OwnerFlags(dp_size=2, enable_dp_attention=True)


def plan(remote: RemoteFlags, owners: OwnerFlags = THREE) -> RemotePlan:
    given = flags(owners=owners, remote=remote)
    return plan_remote(given, configuration.ownership(owners))


def host_file(directory: Path, count: int) -> Path:
    path = directory / "hosts.json"
    path.write_text(json.dumps([{"ssh": f"m{n}", "ips": [f"10.0.0.{n}"]} for n in range(count)]))
    return path


def test_without_a_flag_all_workers_are_on_this_machine() -> None:
    assert plan(RemoteFlags()) == RemotePlan()


def test_the_last_workers_are_the_remote_ones() -> None:
    made = plan(RemoteFlags(remote_workers=2, dist_init_addr=HERE))
    assert made.ranks == {1, 2}
    assert made.address == HERE
    assert not made.launch


def test_all_workers_of_a_host_file_are_remote(tmp_path) -> None:
    remote = RemoteFlags(hostfile=host_file(tmp_path, 3), dist_init_addr=HERE)
    made = plan(remote)
    assert made.ranks == {0, 1, 2}
    assert made.launch
    assert [host.ips for host in made.hosts] == [("10.0.0.0",), ("10.0.0.1",), ("10.0.0.2",)]


def test_keys_are_read_before_anything_starts(tmp_path) -> None:
    remote = RemoteFlags(remote_workers=1, dist_init_addr=HERE, keys=tmp_path)
    with pytest.raises(ConfigError, match="mlx-dp keys --dir"):
        plan(remote)
    write_keys(tmp_path, ["worker"])
    made = plan(remote)
    assert made.keys is not None
    assert len(made.keys.allowed) == 1


@pytest.mark.parametrize(
    ("remote", "owners", "found"),
    [
        (
            RemoteFlags(remote_workers=4, dist_init_addr=HERE),
            THREE,
            "4 is out of range: use 0 to 3",
        ),
        (RemoteFlags(remote_workers=-1, dist_init_addr=HERE), THREE, "-1 is out of range"),
        (RemoteFlags(remote_workers=1), THREE, "as --dist-init-addr"),
        (RemoteFlags(remote_workers=1, dist_init_addr=HERE), GROUP, "give --hostfile in place"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(remote, owners, found) -> None:
    with pytest.raises(ConfigError, match=found):
        plan(remote, owners)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:x", f"tcp://{HERE}"]
)
def test_what_is_no_address_is_refused_before_anything_starts(address) -> None:
    with pytest.raises(ConfigError, match=f"--dist-init-addr {address} is not an address"):
        plan(RemoteFlags(remote_workers=1, dist_init_addr=address))


@pytest.mark.parametrize("address", ["[::1]:7801", "localhost:0", "127.0.0.1:65535"])
def test_addresses_of_this_machine_alone_need_no_keys(address) -> None:
    assert plan(RemoteFlags(remote_workers=1, dist_init_addr=address)).address == address


def test_an_address_that_others_reach_needs_keys_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="give their directory as --keys"):
        plan(RemoteFlags(remote_workers=1, dist_init_addr="10.0.0.1:7801"))


def test_a_host_file_must_have_a_host_for_each_worker(tmp_path) -> None:
    remote = RemoteFlags(hostfile=host_file(tmp_path, 2), dist_init_addr=HERE)
    with pytest.raises(ConfigError, match="names 2 hosts, and there are 3 workers"):
        plan(remote)


@pytest.mark.parametrize("address", ["0.0.0.0:7801", "*:7801", "[::]:7801"])
def test_hosts_are_launched_with_an_address_that_they_can_reach(tmp_path, address) -> None:
    hosts = host_file(tmp_path, 3)
    write_keys(tmp_path, ["worker"])
    made = RemoteFlags(hostfile=hosts, dist_init_addr=address, keys=tmp_path)
    with pytest.raises(ConfigError, match="give the one by which they reach it"):
        plan(made)
    assert plan(replace(made, launch=False)).address


def test_a_host_file_says_how_many_workers_are_remote(tmp_path) -> None:
    remote = RemoteFlags(hostfile=host_file(tmp_path, 3), dist_init_addr=HERE, remote_workers=1)
    with pytest.raises(ConfigError, match="so omit it"):
        plan(remote)


def test_silence_is_never_shorter_than_a_few_heartbeats() -> None:
    remote = RemoteFlags(remote_workers=1, dist_init_addr=HERE)
    slow = OwnerFlags(dp_size=3, heartbeat_interval=10.0)
    assert plan(remote, slow).silence_s == 40.0
    assert plan(remote, OwnerFlags(dp_size=3, hang_timeout=3.0)).silence_s == 3.0
    assert plan(remote).silence_s == 5.0
