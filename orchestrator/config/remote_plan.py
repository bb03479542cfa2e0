"""Plans the workers on other machines: their ranks, addresses and keys."""

import re
from dataclasses import dataclass
from typing import Final

from mlx_dp.orchestrator.config.flags import Flags
from mlx_dp.orchestrator.process.remote.host_file import Host, read_host_file
from mlx_dp.proto.capacity.ownership import Ownership
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.wire.key_files import ControllerKeys, read_controller_keys
from mlx_dp.proto.wire.router_socket import LAST_PORT, check_open_address

_ADDRESS: Final = re.compile(r"(?P<host>[^/:\s]+|\[[^/\]\s]+\]):(?P<port>[0-9]{1,5})")
_FEWEST_HEARTBEATS: Final = 4.0
_SILENCE_S: Final = 5.0
EVERY_ADDRESS: Final = frozenset({"", "*", "0.0.0.0", "[::]"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlan:
    """``ranks`` is empty and ``address`` None when all workers run on this machine."""

    ranks: frozenset[int] = frozenset()
    address: str | None = None
    keys: ControllerKeys | None = None
    hosts: tuple[Host, ...] = ()
    """By rank, from the host file."""
    launch: bool = False
    heartbeat_s: float = 0.5
    silence_s: float = _SILENCE_S


def plan_remote(flags: Flags, ownership: Ownership) -> RemotePlan:
    """Plan by the flags. Raises ConfigError when they contradict each other."""
    workers = len(ownership.slices)
    remote = flags.remote
    hosts = () if remote.hostfile is None else read_host_file(remote.hostfile)
    count = len(hosts) if hosts else remote.remote_workers
    if not 0 <= remote.remote_workers <= workers:
        raise ConfigError(
            f"--remote-workers {remote.remote_workers} is out of range: use 0 to {workers}, the "
            "number of workers"
        )
    if count == 0:
        return RemotePlan()
    if remote.dist_init_addr is None:
        raise ConfigError(
            "workers on other machines need an address to connect to: give host:port of this "
            "machine as --dist-init-addr"
        )
    _check_address(remote.dist_init_addr, with_keys=remote.keys is not None)
    if ownership.mode is ReplicaMode.DP_ATTENTION and not hosts:
        raise ConfigError(
            "a dp-attention group on several machines needs their addresses: give --hostfile in "
            "place of --remote-workers"
        )
    if hosts:
        _check_hosts(flags, len(hosts), workers)
    heartbeat_s = flags.owners.heartbeat_interval
    return RemotePlan(
        ranks=frozenset(range(workers - count, workers)),
        address=remote.dist_init_addr,
        keys=None if remote.keys is None else read_controller_keys(remote.keys),
        hosts=hosts,
        launch=bool(hosts) and remote.launch,
        heartbeat_s=heartbeat_s,
        silence_s=max(min(_SILENCE_S, flags.owners.hang_timeout), _FEWEST_HEARTBEATS * heartbeat_s),
    )


def _check_address(address: str, *, with_keys: bool) -> None:
    found = _ADDRESS.fullmatch(address)
    # ZeroMQ reduces a larger port modulo 65536, and would listen there.
    if found is None or int(found["port"]) > LAST_PORT:
        raise ConfigError(
            f"--dist-init-addr {address} is not an address: use host:port, with a port of 0 to "
            f"{LAST_PORT} (0 picks a free one)"
        )
    if not with_keys:
        check_open_address(address)


def _check_hosts(flags: Flags, hosts: int, workers: int) -> None:
    remote = flags.remote
    if hosts != workers:
        raise ConfigError(
            f"--hostfile {remote.hostfile} names {hosts} hosts, and there are {workers} workers: "
            "name a host for each, the same one twice to run two there"
        )
    if remote.remote_workers:
        raise ConfigError(
            f"--remote-workers {remote.remote_workers} repeats --hostfile: all workers of a "
            "host file are remote, so omit it"
        )
    address = remote.dist_init_addr or ""
    if remote.launch and address.rpartition(":")[0] in EVERY_ADDRESS:
        raise ConfigError(
            f"--dist-init-addr {address} stands for every address of this machine, but hosts need "
            "one to connect to: give the one by which they reach it"
        )
