"""Command lines of ``mlx-dp worker``, for mlx.launch and for users to paste."""

import shlex
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from mlx_dp.orchestrator.config.flags import Flags, OwnerFlags
from mlx_dp.orchestrator.config.remote_plan import EVERY_ADDRESS, RemotePlan

_DOCUMENT_NETWORK: Final = ("192.0.2.1", 9)
"""A documentation address: no packet is sent, the system only names the route's interface."""


def worker_arguments(flags: Flags, plan: RemotePlan, endpoint: str) -> list[str]:
    """The arguments for every host, except its rank."""
    arguments = ["--controller", _reachable(endpoint)]
    together = max(Counter(host.ssh for host in plan.hosts).values(), default=1)
    fraction = flags.owners.mem_fraction_static / together
    if fraction != OwnerFlags().mem_fraction_static:
        arguments += ["--mem-fraction-static", f"{fraction:g}"]
    if flags.http.log_level != "info":
        arguments += ["--log-level", flags.http.log_level]
    if flags.http.no_caffeinate:
        arguments.append("--no-caffeinate")
    if flags.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    if flags.remote.keys is not None:
        arguments += ["--keys", str(flags.remote.keys.absolute())]
    return arguments


def connect_hint(flags: Flags, plan: RemotePlan, endpoint: str) -> list[str]:
    """Lines that tell the user how to start the remote workers. Commands have their own lines."""
    if plan.launch:
        hosts = ", ".join(host.ssh for host in plan.hosts)
        return [f"mlx-dp: ranks are started over ssh, and connect to {endpoint}: {hosts}"]
    arguments = worker_arguments(flags, plan, endpoint)
    ranks = sorted(plan.ranks)
    each = "this" if len(ranks) == 1 else "one of these"
    keys = "" if flags.remote.keys is None else " (--keys: where its own keys lie)"
    return [
        f"mlx-dp: on each other machine, paste {each}{keys}:",
        *(shlex.join([*_program(), "worker", "--rank", str(r), *arguments]) for r in ranks),
    ]


def _program() -> list[str]:
    script = Path(sys.executable).with_name("mlx-dp")
    if script.is_file():
        return [str(script)]
    return [sys.executable, "-m", "mlx_dp.orchestrator.cli.entry"]


def _reachable(endpoint: str) -> str:
    """Replace a wildcard address by one that other machines can connect to."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{_own_address()}:{port}" if host in EVERY_ADDRESS else endpoint


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(_DOCUMENT_NETWORK)
        except OSError:
            return socket.gethostname()
        return str(way.getsockname()[0])
