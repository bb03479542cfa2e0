"""Everything that ``serve`` needs for workers on other machines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from mlx_dp.orchestrator.cli.remote_command import worker_arguments
from mlx_dp.orchestrator.config.flags import Flags
from mlx_dp.orchestrator.config.remote_plan import RemotePlan
from mlx_dp.orchestrator.model.fingerprint import model_fingerprint
from mlx_dp.orchestrator.ports import AddressSource, Launcher
from mlx_dp.orchestrator.process.loopback_addresses import LoopbackAddresses
from mlx_dp.orchestrator.process.remote.host_addresses import HostAddresses
from mlx_dp.orchestrator.process.remote.host_table import HostTimes
from mlx_dp.orchestrator.process.remote.mlx_launch import LaunchPlan, MlxLaunch, launch_command
from mlx_dp.orchestrator.process.remote.remote_launcher import RemoteLauncher, RemoteModel
from mlx_dp.proto.messages.events import FailureKind
from mlx_dp.proto.messages.group import DistributedBackend
from mlx_dp.proto.wire.controller_channel import ControllerChannel

OnGiveUp = Callable[[str, FailureKind | None], None]

_PATIENCE: Final = 3.0
"""In units of the silence limit: a host that was given up may come back by itself."""


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
    """How to launch the hosts, or None if they are started by hand."""
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
