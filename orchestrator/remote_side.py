"""Joins what ``serve`` needs for workers on other machines."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from mlx_dp.orchestrator.control.group_addresses import AddressBook
from mlx_dp.orchestrator.control.worker_process import Launcher
from mlx_dp.orchestrator.flags import Flags
from mlx_dp.orchestrator.model.fingerprint import model_fingerprint
from mlx_dp.orchestrator.process.host_addresses import HostAddresses
from mlx_dp.orchestrator.process.host_book import HostTimes
from mlx_dp.orchestrator.process.loopback_addresses import LoopbackAddresses
from mlx_dp.orchestrator.process.mlx_launch import MlxLaunch, launch_command
from mlx_dp.orchestrator.process.remote_launcher import RemoteLauncher, RemoteModel
from mlx_dp.orchestrator.remote_plan import RemotePlan
from mlx_dp.proto.controller_channel import ControllerChannel
from mlx_dp.proto.group import DistributedBackend


class RemoteSide:
    """The launcher and the addresses of all workers, wherever they run."""

    def __init__(
        self,
        plan: RemotePlan,
        local: Launcher,
        channel: ControllerChannel,
        model: RemoteModel,
        launch: MlxLaunch | None,
    ) -> None:
        self._launch: Final = launch
        times = HostTimes(beat_s=plan.beat_s, silence_s=plan.silence_s)
        self.launcher: Final = RemoteLauncher(local, channel, plan.ranks, model, times)
        self.addresses: Final[AddressBook] = (
            HostAddresses(plan.hosts) if plan.hosts else LoopbackAddresses(channel.endpoint)
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the hosts, and have them launched where that is ours to do."""
        self.launcher.start()
        launching = None if self._launch is None else asyncio.create_task(self._launch.run())
        try:
            yield
        finally:
            self.launcher.stop()
            if self._launch is not None and launching is not None:
                self._launch.stop()
                await launching


def remote_model(path: Path | None, log_level: str) -> RemoteModel:
    """What hosts compare theirs with; the fake engine has nothing to compare."""
    return RemoteModel(
        path="" if path is None else str(path),
        fingerprint="" if path is None else model_fingerprint(path),
        log_level=log_level,
    )


def mlx_launch(
    flags: Flags, plan: RemotePlan, endpoint: str | None, write_line: Callable[[str], None]
) -> MlxLaunch | None:
    """The launcher of the hosts, or None where they are started by hand."""
    if not plan.launch:
        return None
    assert flags.remote.hostfile is not None and endpoint is not None
    together = max(Counter(host.ssh for host in plan.hosts).values())
    arguments = [
        *("--controller", endpoint),
        *("--mem-fraction-static", f"{flags.owners.mem_fraction_static / together:g}"),
        *("--log-level", flags.http.log_level),
    ]
    if flags.http.no_caffeinate:
        arguments.append("--no-caffeinate")
    if flags.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    if flags.remote.keys is not None:
        arguments += ["--keys", str(flags.remote.keys.absolute())]
    backend = flags.owners.distributed_backend or DistributedBackend.RING
    return MlxLaunch(launch_command(flags.remote.hostfile, backend, arguments), write_line)
