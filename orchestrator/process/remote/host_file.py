"""Host files, in the format of ``mlx.launch``, and the addresses of a group on their machines."""

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from mlx_dp.orchestrator.ports import GroupAddresses
from mlx_dp.proto.capacity.parallel import MAX_OWNERS
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.wire.curve import make_keys

_MAX_NBYTES: Final = 2**20
FIRST_PORT: Final = 32_323
"""The first port that ``mlx.launch`` uses, too."""
PORTS: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One rank's machine: its name for ssh, and its addresses for the other ranks."""

    ssh: Annotated[str, Meta(min_length=1, max_length=255)]
    ips: Annotated[tuple[str, ...], Meta(max_length=16)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostFile:
    hosts: Annotated[tuple[Host, ...], Meta(min_length=1, max_length=MAX_OWNERS)]


def read_host_file(path: Path) -> tuple[Host, ...]:
    """Read one host per rank. Raises ConfigError, which names the wrong field."""
    try:
        with path.open("rb") as file:
            content: Any = msgspec.json.decode(file.read(_MAX_NBYTES))
        hosts = content if isinstance(content, dict) else {"hosts": content}
        found = msgspec.convert(hosts, _HostFile).hosts
        for rank, host in enumerate(found):
            if not host.ips:
                raise ValueError(f"hosts[{rank}] has no ips, by which the others reach it")
            for ip in host.ips:
                ipaddress.ip_address(ip)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--hostfile {path} cannot be used: {error}. It is a list such as "
            '[{"ssh": "mac1.local", "ips": ["10.0.0.1"]}, ...], as mlx.launch reads it'
        ) from None
    return found


class HostAddresses:
    """Addresses of the ranks of a dp-attention group, one for each generation.

    The free ports of other machines are unknown, so each generation uses the next ports. A port
    that is in use fails one start only.
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
