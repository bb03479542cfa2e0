"""Addresses for a group whose ranks are on the machines of a host file."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from mlx_dp.orchestrator.control.ports import GroupAddresses
from mlx_dp.orchestrator.process.host_file import Host
from mlx_dp.proto.curve import make_keys

FIRST_PORT: Final = 32_323
"""Where ``mlx.launch`` begins too."""
PORTS: Final = 16_384


class HostAddresses:
    """Ports of each host in turn, since nobody can ask another machine which of its are free.

    A port that somebody has costs one start: the next generation has others.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._ips: Final = tuple(host.ips[0] for host in hosts)
        self._each: Final = 2 * max(Counter(self._ips).values())

    def fresh(self, size: int, generation: int) -> GroupAddresses:
        """See ``AddressBook``."""
        assert size == len(self._ips), f"{size} ranks on {len(self._ips)} hosts"
        used: Counter[str] = Counter()

        def take(ip: str) -> str:
            port = FIRST_PORT + (generation * self._each + used[ip]) % PORTS
            used[ip] += 1
            return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

        addresses = tuple(take(ip) for ip in self._ips)
        peers = tuple(f"tcp://{take(ip)}" for ip in self._ips)
        # Of its own, so that nobody of an earlier generation is let in.
        return GroupAddresses(addresses=addresses, peers=peers, curve=make_keys())
