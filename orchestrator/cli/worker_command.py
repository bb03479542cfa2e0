"""``mlx-dp worker``: checks everything first, then runs the host."""

import asyncio
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from mlx_dp.orchestrator.config.configuration import LOG_LEVELS
from mlx_dp.orchestrator.config.memory_share import ram_nbytes, shared_memory
from mlx_dp.orchestrator.model.fingerprint import model_fingerprint
from mlx_dp.orchestrator.model.model_probe import ModelProbe, probe_model
from mlx_dp.orchestrator.ports import Launcher
from mlx_dp.orchestrator.process.launcher import ProcessLauncher
from mlx_dp.orchestrator.process.log_output import StderrConsole, configure_logging, write_plain
from mlx_dp.orchestrator.process.power_assertion import keep_awake
from mlx_dp.orchestrator.process.remote.host_link import ControllerPlace
from mlx_dp.orchestrator.process.remote.worker_host import WorkerHost
from mlx_dp.orchestrator.process.stop_signals import EXIT_SIGNAL_BASE, StopSignals
from mlx_dp.orchestrator.process.worker_environment import (
    WorkerEnvironment,
    cuda_devices,
    worker_environment,
)
from mlx_dp.proto.descriptor_limit import check_descriptor_limit
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.fields import clip_text
from mlx_dp.proto.messages.host_messages import Join, Launch
from mlx_dp.proto.wire.host_channel import HostChannel
from mlx_dp.proto.wire.key_files import WorkerKeys, read_worker_keys
from mlx_dp.proto.wire.loopback import is_loopback
from mlx_dp.proto.wire.router_socket import LAST_PORT, host_of

_ENDPOINT: Final = re.compile(r"tcp://(?P<address>[^/\s]+:(?P<port>[0-9]{1,5}))")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """The parsed command line of ``mlx-dp worker``."""

    controller: str
    rank: int
    keys: Path | None
    model: Path | None
    mem_fraction_static: float
    log_level: str
    once: bool
    trust_remote_code: bool = False
    no_caffeinate: bool = False


def serve_worker(options: HostOptions, environment: Mapping[str, str]) -> int:
    """Run a host until a signal; return the exit status. Raises ConfigError before any work."""
    _check(options)
    keys = None if options.keys is None else read_worker_keys(options.keys)
    if options.model is not None and not options.model.is_dir():
        raise ConfigError(
            f"--model {options.model} is not a directory on this machine: give the one to which "
            "the controller's model was copied"
        )
    if options.model is not None:
        model_fingerprint(options.model)
    console = StderrConsole()
    configure_logging(console, options.log_level)
    machine = LocalMachine(
        options, environment, lambda line: write_plain(console, f"worker: {line}")
    )
    join = Join(rank=options.rank, host=clip_text(socket.gethostname()), pid=os.getpid())
    connect = partial(_connect, options.controller, keys)
    with (
        # Output of libraries goes to the log, whose writers never block.
        redirect_stdout(sys.stderr),
        keep_awake(environment, partial(_warn, console), wanted=not options.no_caffeinate),
    ):
        return asyncio.run(_run(join, options, connect, machine))


def _warn(console: Console, warning: str) -> None:
    write_plain(console, f"mlx-dp: warning: {warning}")


async def _run(
    join: Join, options: HostOptions, connect: Callable[[str], HostChannel], machine: "LocalMachine"
) -> int:
    # Workers watch their parent, so they end with this process even so.
    stop = StopSignals(lambda number: os._exit(EXIT_SIGNAL_BASE + number))
    stop.install(asyncio.get_running_loop())
    keys = "" if options.keys is None else str(options.keys)
    place = ControllerPlace(endpoint=options.controller, keys=keys)
    host = WorkerHost(join, place, connect, machine.launcher, stop.requested, once=options.once)
    status = await host.run()
    return status or stop.status


def _connect(endpoint: str, keys: WorkerKeys | None, identity: str) -> HostChannel:
    return HostChannel(endpoint, identity, keys)


def _check(options: HostOptions) -> None:
    if options.log_level not in LOG_LEVELS:
        raise ConfigError(
            f"--log-level {options.log_level!r} is unknown: use one of {', '.join(LOG_LEVELS)}"
        )
    found = _ENDPOINT.fullmatch(options.controller)
    # ZeroMQ reduces a larger port modulo 65536, and would connect there.
    if found is None or not 0 < int(found["port"]) <= LAST_PORT:
        raise ConfigError(
            f"--controller {options.controller!r} is not an address: use tcp://host:port, as "
            "in the controller's --dist-init-addr"
        )
    if options.keys is None and not is_loopback(host_of(found["address"])):
        raise ConfigError(
            f"--controller {options.controller} is another machine, which requires keys: make "
            "them there with mlx-dp keys, and give the directory of this worker's key as --keys"
        )
    if not 0.0 < options.mem_fraction_static <= 1.0:
        raise ConfigError(
            f"--mem-fraction-static {options.mem_fraction_static:g} is out of range: use more "
            "than 0 and at most 1"
        )


class LocalMachine:
    """This machine's model and device, and the launcher of workers on it."""

    def __init__(
        self,
        options: HostOptions,
        environment: Mapping[str, str],
        write_line: Callable[[str], None],
    ) -> None:
        self._options: Final = options
        self._environment: Final = environment
        self._write_line: Final = write_line
        self._probes: Final[dict[Path, ModelProbe]] = {}

    def launcher(self, launch: Launch) -> Launcher:
        """Make a launcher. Raises ConfigError when the model here is not the controller's."""
        command = [sys.executable, "-m", "mlx_dp.worker", "serve"]
        if self._options.keys is not None:
            command += ["--keys", str(self._options.keys)]
        environment = WorkerEnvironment(common={**self._environment, "PYTHONUNBUFFERED": "1"})
        if launch.model_path:
            check_descriptor_limit()
            path = self._model(launch)
            trusted = self._options.trust_remote_code
            probe = self._find_probe(path)
            device = probe.device
            devices = cuda_devices(self._environment) if device.kind == "cuda" else ()
            memory = shared_memory(
                device, ram_nbytes=ram_nbytes(), cuda_devices=max(1, len(devices))
            )
            # The worker checks whether the model fits: in a group it holds only a part.
            share = memory.share_nbytes(1, self._options.mem_fraction_static)
            command += ["--model-path", str(path), "--memory-nbytes", str(share)]
            command += ["--trust-remote-code" if trusted else "--no-trust-remote-code"]
            environment = worker_environment(
                self._environment,
                device=device.kind,
                float32=probe.float32,
                cuda_devices=devices,
                workers=1,
            )
        return ProcessLauncher(
            environment.for_worker,
            lambda _, line: self._write_line(line),
            log_level=launch.log_level,
            command=tuple(command),
        )

    def _find_probe(self, path: Path) -> ModelProbe:
        """Probe a model once in a child process, so that restarts need not wait for it."""
        if path not in self._probes:
            trusted = self._options.trust_remote_code
            self._probes[path] = probe_model(path, trust_remote_code=trusted)
        return self._probes[path]

    def _model(self, launch: Launch) -> Path:
        path = self._options.model or Path(launch.model_path)
        if not path.is_dir():
            raise ConfigError(
                f"this machine has no model directory {path}: give its own as --model"
            )
        if model_fingerprint(path) != launch.model_fingerprint:
            raise ConfigError(
                f"the model in {path} is not the one that the controller serves from "
                f"{launch.model_path}: copy that one here, and give its directory as --model"
            )
        return path
