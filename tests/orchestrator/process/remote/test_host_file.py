import json
from pathlib import Path

import pytest

from mlx_dp.orchestrator.process.remote.host_file import (
    FIRST_PORT,
    Host,
    HostAddresses,
    read_host_file,
)
from mlx_dp.proto.errors import ConfigError

TWO = [{"ssh": "mac1", "ips": ["10.0.0.1"]}, {"ssh": "mac2", "ips": ["10.0.0.2", "10.1.0.2"]}]
HOSTS = (Host(ssh="mac1", ips=("10.0.0.1",)), Host(ssh="mac2", ips=("10.0.0.2", "10.1.0.2")))


def written(directory: Path, content: object) -> Path:
    path = directory / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    "content", [TWO, {"hosts": TWO, "backend": "ring", "envs": ["A=1"]}], ids=["list", "table"]
)
def test_both_forms_of_a_host_file_are_read(tmp_path, content) -> None:
    assert read_host_file(written(tmp_path, content)) == HOSTS


@pytest.mark.mlx
# It leaves the file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_it_is_read_as_mlx_launch_reads_it(tmp_path) -> None:
    from mlx._distributed_utils.common import Hostfile

    theirs = Hostfile.from_file(written(tmp_path, TWO)).hosts
    assert [(host.ssh_hostname, tuple(host.ips)) for host in theirs] == [
        (host.ssh, host.ips) for host in HOSTS
    ]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("not json", "JSON is malformed"),
        ([], "length >= 1"),
        ([{"ips": ["10.0.0.1"]}], "missing required field `ssh`"),
        ([{"ssh": "mac1"}], r"hosts\[0\] has no ips"),
        ([{"ssh": "mac1", "ips": ["mac1.local"]}], "'mac1.local' does not appear to be an IPv4"),
        ([{"ssh": "mac1", "ips": "10.0.0.1"}], "Expected `array`"),
        (3, "Expected `array`"),
    ],
)
def test_what_is_wrong_with_it_is_said(tmp_path, content, found) -> None:
    with pytest.raises(ConfigError, match=rf"--hostfile .*hosts\.json cannot be used: .*{found}"):
        read_host_file(written(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        read_host_file(tmp_path / "nowhere.json")


def test_each_rank_is_met_at_an_address_of_its_own_machine() -> None:
    found = HostAddresses(HOSTS).fresh(2, 0)
    assert found.addresses == (f"10.0.0.1:{FIRST_PORT}", f"10.0.0.2:{FIRST_PORT}")
    assert found.peers == (f"tcp://10.0.0.1:{FIRST_PORT + 1}", f"tcp://10.0.0.2:{FIRST_PORT + 1}")
    assert found.curve is not None


@pytest.mark.parametrize(
    "ips", [("10.0.0.1", "10.0.0.2"), ("10.0.0.1", "10.0.0.1"), ("::1", "::2")]
)
def test_no_two_generations_in_a_row_share_an_address_or_a_key(ips) -> None:
    addresses = HostAddresses([Host(ssh="mac", ips=(ip,)) for ip in ips])
    met: set[str] = set()
    keys: set[str] = set()
    for generation in range(50):
        found = addresses.fresh(2, generation)
        each = {*found.addresses, *(peer.removeprefix("tcp://") for peer in found.peers)}
        assert len(each) == 4
        assert not each & met
        met |= each
        assert found.curve is not None
        keys.add(found.curve.secret)
    assert len(keys) == 50


def test_ports_stay_in_their_range_however_often_a_group_is_formed() -> None:
    addresses = HostAddresses(HOSTS)
    for generation in (10**4, 10**6, 2**31 - 1):
        for address in addresses.fresh(2, generation).addresses:
            assert FIRST_PORT <= int(address.rpartition(":")[2]) < 2**16
