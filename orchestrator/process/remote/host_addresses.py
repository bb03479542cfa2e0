"""Addresses for a dp-attention group on the machines of a host file."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from mlx_dp.orchestrator.ports import GroupAddresses
from mlx_dp.orchestrator.process.remote.host_file import Host
from mlx_dp.proto.wire.curve import make_keys

FIRST_PORT: Final = 32_323
"""The first port of ``mlx.launch`` too."""
PORTS: Final = 16_384


class HostAddresses:
    """Rotates through the ports of each host, since free ports of other machines are unknown.

    A port in use fails one start; the next generation gets other ports.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._ips: Final = tuple(host.ips[0] for host in hosts)
        self._each: Final = 2 * max(Counter(self._ips).values())

    def fresh(self, size: int, generation: int) -> GroupAddresses:
        """See ``AddressSource``."""
        assert size == len(self._ips), f"{size} ranks on {len(self._ips)} hosts"
        used: Counter[str] = Counter()

        def take(ip: str) -> str:
            port = FIRST_PORT + (generation * self._each + used[ip]) % PORTS
            used[ip] += 1
            return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

        addresses = tuple(take(ip) for ip in self._ips)
        peers = tuple(f"tcp://{take(ip)}" for ip in self._ips)
        # New keys, so that processes of an earlier generation cannot connect.
        return GroupAddresses(addresses=addresses, peers=peers, curve=make_keys())
