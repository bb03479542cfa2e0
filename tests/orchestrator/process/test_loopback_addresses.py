"""Addresses of a group on one machine: free ports, and sockets in the controller's directory."""

import socket
from pathlib import Path

import pytest

from mlx_dp.orchestrator.process.loopback_addresses import LOOPBACK, LoopbackAddresses, free_ports
from mlx_dp.proto.errors import ConfigError


def port_of(address: str) -> int:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    assert host == LOOPBACK
    return int(port)


def test_each_rank_has_a_port_that_can_be_bound_and_a_socket_of_its_own(short_path: Path) -> None:
    addresses = LoopbackAddresses(f"ipc://{short_path}/workers")
    found = addresses.fresh(3, 7)
    assert found.curve is None
    assert found.peers == tuple(f"ipc://{short_path}/g7-{rank}" for rank in range(3))
    assert len({*found.addresses}) == 3
    for address in found.addresses:
        with socket.socket() as bound:
            bound.bind((LOOPBACK, port_of(address)))


def test_no_port_is_of_the_generation_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(4)
    probes: list[int] = [*first, *range(1, 9)]
    monkeypatch.setattr(socket.socket, "bind", lambda probe, address: None)
    monkeypatch.setattr(socket.socket, "getsockname", lambda probe: (LOOPBACK, probes.pop(0)))
    assert free_ports(4, taken=first) == (1, 2, 3, 4)


def test_the_generation_before_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, ...]] = []

    def found(count: int, *, taken: tuple[int, ...] = ()) -> tuple[int, ...]:
        told.append(taken)
        return tuple(range(100 + len(told), 100 + len(told) + count))

    monkeypatch.setattr("mlx_dp.orchestrator.process.loopback_addresses.free_ports", found)
    addresses = LoopbackAddresses("ipc:///tmp/x/workers")
    addresses.fresh(2, 0)
    addresses.fresh(2, 1)
    assert told == [(), (101, 102)]


def test_sockets_of_killed_ranks_are_cleared_away(short_path: Path) -> None:
    addresses = LoopbackAddresses(f"ipc://{short_path}/workers")
    for name in ("workers", "lock", "g0-0", "g0-1"):
        (short_path / name).touch()
    addresses.fresh(2, 1)
    assert {path.name for path in short_path.iterdir()} == {"workers", "lock"}


def test_without_ipc_the_ranks_meet_on_ports_with_keys_of_their_own() -> None:
    addresses = LoopbackAddresses("tcp://127.0.0.1:5555")
    first, second = (addresses.fresh(2, generation) for generation in (0, 1))
    for found in (first, second):
        assert len({port_of(each) for each in (*found.addresses, *found.peers)}) == 4
    assert first.curve is not None
    assert second.curve is not None
    assert first.curve.secret != second.curve.secret


def test_a_directory_whose_socket_paths_are_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="use a shorter directory"):
        LoopbackAddresses(f"ipc:///tmp/{'x' * 100}/workers")
