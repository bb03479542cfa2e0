"""Workers on other machines, as ``serve`` needs them: their launcher and their command lines."""

import asyncio
import shlex
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from mlx_dp.orchestrator.config.flags import Flags, OwnerFlags
from mlx_dp.orchestrator.config.remote_plan import EVERY_ADDRESS, RemotePlan
from mlx_dp.orchestrator.model.fingerprint import model_fingerprint
from mlx_dp.orchestrator.ports import AddressSource, Launcher
from mlx_dp.orchestrator.process.loopback_addresses import LoopbackAddresses
from mlx_dp.orchestrator.process.remote.host_file import HostAddresses
from mlx_dp.orchestrator.process.remote.host_table import HostTimes
from mlx_dp.orchestrator.process.remote.mlx_launch import LaunchPlan, MlxLaunch, launch_command
from mlx_dp.orchestrator.process.remote.remote_launcher import RemoteLauncher, RemoteModel
from mlx_dp.proto.messages.events import FailureKind
from mlx_dp.proto.messages.group import DistributedBackend
from mlx_dp.proto.wire.controller_channel import ControllerChannel

_DOCUMENT_NETWORK: Final = ("192.0.2.1", 9)
"""A documentation address: no packet is sent, the system only names the route's interface."""
_PATIENCE: Final = 3.0
"""In units of the silence limit: a host that was given up may come back by itself."""

OnGiveUp = Callable[[str, FailureKind | None], None]


class RemoteWorkers:
    """Provides the launcher and the group addresses of all workers, local and remote."""

    def __init__(
        self,
        plan: RemotePlan,
        local: Launcher,
        channel: ControllerChannel,
        model: RemoteModel,
        launch: LaunchPlan | None,
        write_line: Callable[[str], None],
    ) -> None:
        """``write_line`` gets each line that launched hosts print."""
        times = HostTimes(heartbeat_s=plan.heartbeat_s, silence_s=plan.silence_s)
        self.launcher: Final = RemoteLauncher(local, channel, plan.ranks, model, times)
        self._launch: Final = (
            None if launch is None else MlxLaunch(launch, write_line, self.launcher.present)
        )
        self.addresses: Final[AddressSource] = (
            HostAddresses(plan.hosts) if plan.hosts else LoopbackAddresses(channel.endpoint)
        )

    @asynccontextmanager
    async def running(self, give_up: OnGiveUp) -> AsyncIterator[None]:
        """Watch the hosts, and keep them launched if the plan says so.

        Calls ``give_up`` when they cannot be launched.
        """
        self.launcher.start()
        launching = asyncio.create_task(self._keep_launched(give_up))
        try:
            yield
        finally:
            self.launcher.stop()
            if self._launch is not None:
                self._launch.stop()
            await launching

    async def _keep_launched(self, give_up: OnGiveUp) -> None:
        if self._launch is None:
            return
        end = await self._launch.run()
        if end is not None:
            give_up(end.cause, FailureKind.CONFIG if end.final else None)


def remote_model(path: Path | None, log_level: str) -> RemoteModel:
    """The model that hosts compare theirs with; empty for the fake engine."""
    return RemoteModel(
        path="" if path is None else str(path),
        fingerprint="" if path is None else model_fingerprint(path),
        log_level=log_level,
    )


def mlx_launch(flags: Flags, plan: RemotePlan, endpoint: str | None) -> LaunchPlan | None:
    """Return the plan to launch the hosts, or None if they are started by hand."""
    if not plan.launch:
        return None
    assert flags.remote.hostfile is not None and endpoint is not None
    return LaunchPlan(
        command=launch_command(
            flags.remote.hostfile,
            flags.owners.distributed_backend or DistributedBackend.RING,
            worker_arguments(flags, plan, endpoint),
        ),
        hosts=plan.hosts,
        max_restarts=flags.owners.max_restarts,
        restart_window_s=flags.owners.restart_window,
        restart_delay_s=flags.owners.restart_delay,
        patience_s=_PATIENCE * plan.silence_s,
    )


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
