"""Host files, in the format of ``mlx.launch``."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from mlx_dp.proto.capacity.parallel import MAX_OWNERS
from mlx_dp.proto.errors import ConfigError

_MAX_NBYTES: Final = 2**20


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
