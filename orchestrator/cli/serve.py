"""``mlx-dp serve``: checks everything first, then starts the processes."""

import asyncio
import gc
import socket
import sys
from collections.abc import Mapping
from contextlib import closing, redirect_stdout
from functools import partial

from rich.console import Console

from mlx_dp.orchestrator.cli.plan_table import plan_view
from mlx_dp.orchestrator.cli.remote_workers import (
    RemoteWorkers,
    connect_hint,
    mlx_launch,
    remote_model,
)
from mlx_dp.orchestrator.cli.service_run import ServiceRun
from mlx_dp.orchestrator.config import configuration
from mlx_dp.orchestrator.config.flags import Flags
from mlx_dp.orchestrator.config.plan import ServicePlan, make_plan
from mlx_dp.orchestrator.config.preparation import PreparedModel, prepare_model
from mlx_dp.orchestrator.config.remote_plan import plan_remote
from mlx_dp.orchestrator.control.controller import Controller
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.http.connection.listen_socket import bound_port, endpoint_url, open_socket
from mlx_dp.orchestrator.http.connection.server import EmbeddedServer
from mlx_dp.orchestrator.options import ServeOptions, WorkerOptions
from mlx_dp.orchestrator.process.endpoint_upkeep import endpoint_kept
from mlx_dp.orchestrator.process.launcher import ProcessLauncher
from mlx_dp.orchestrator.process.log_output import StderrConsole, configure_logging, write_plain
from mlx_dp.orchestrator.process.log_stream import dropped_lines
from mlx_dp.orchestrator.process.open_files import raise_open_files
from mlx_dp.orchestrator.process.power_assertion import keep_awake
from mlx_dp.orchestrator.process.worker_environment import WorkerEnvironment, worker_environment
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.loading.tokenizer import load_text_model
from mlx_dp.orchestrator.text.text_model import TextModel
from mlx_dp.proto.messages.group import DistributedBackend
from mlx_dp.proto.wire.controller_channel import ControllerChannel
from mlx_dp.proto.wire.loopback import is_loopback


def serve(flags: Flags, environment: Mapping[str, str]) -> int:
    """Serve until a signal; return the exit status. Raises ConfigError before any worker starts."""
    configuration.check_flags(flags)
    ownership = configuration.ownership(flags.owners)
    remote = plan_remote(flags, ownership)
    console = StderrConsole()
    configure_logging(console, flags.http.log_level)
    open_files = raise_open_files()
    with (
        # Output of libraries goes to the log, whose writers never block.
        redirect_stdout(sys.stderr),
        closing(open_socket(flags.http.host, flags.http.port)) as listener,
        keep_awake(environment, partial(_warn, console), wanted=not flags.http.no_caffeinate),
    ):
        model = prepare_model(flags, environment)
        plan = make_plan(flags, ownership, model)
        text = _text_model(flags, model)
        workers = worker_environment(
            environment,
            device=None if model.device is None else model.device.kind,
            float32=model.float32,
            cuda_devices=model.cuda_devices,
            workers=max(1, len(plan.owners) - len(remote.ranks)),
        )
        options = _options(flags, plan, port=bound_port(listener), open_files=open_files)
        _announce(console, options, plan, workers)
        with closing(ControllerChannel(remote=remote.address, keys=remote.keys)) as channel:
            endpoint = channel.remote_endpoint
            if endpoint is not None:
                for line in connect_hint(flags, remote, endpoint):
                    write_plain(console, line)
            side = RemoteWorkers(
                remote,
                _local_launcher(options, workers, console, channel),
                channel,
                remote_model(options.worker.model_path, options.worker.log_level),
                mlx_launch(flags, remote, endpoint),
                lambda line: write_plain(console, f"mlx.launch: {line}"),
            )
            return asyncio.run(_run(options, text, side, channel, console, listener))


def _local_launcher(
    options: ServeOptions,
    workers: WorkerEnvironment,
    console: Console,
    channel: ControllerChannel,
) -> ProcessLauncher:
    return ProcessLauncher(
        workers.for_worker,
        lambda index, line: write_plain(console, f"worker {index}: {line}"),
        log_level=options.worker.log_level,
        prepare=channel.keep_endpoint,
    )


async def _run(
    options: ServeOptions,
    text: TextModel,
    side: RemoteWorkers,
    channel: ControllerChannel,
    console: Console,
    listener: socket.socket,
) -> int:
    ports = ControlPorts(channel, side.launcher, side.addresses)
    controller = Controller(options, ports, host_of=side.launcher.host_of)
    app = create_app(controller, options.http, text, dropped_lines=dropped_lines)
    server = EmbeddedServer(
        app, listener, options.http, access_log=options.worker.log_level == "debug"
    )
    run = ServiceRun(
        controller,
        server,
        console,
        url=endpoint_url(options.http.host, options.http.port),
        drain_timeout_s=options.http.drain_timeout_s,
    )
    # Modules and tokenizer stay for good. A full garbage collection that scans them all stalls the
    # event loop for 50 ms and more, and responses with many log-probabilities trigger dozens.
    gc.collect()
    gc.freeze()
    async with side.running(controller.give_up), endpoint_kept(channel.keep_endpoint):
        return await run.run()


def _text_model(flags: Flags, model: PreparedModel) -> TextModel:
    if model.path is None:
        return FakeTextModel(flags.fake.fake_vocab_size, flags.fake.fake_context_length)
    return load_text_model(
        model.path,
        trust_remote_code=flags.model.trust_remote_code,
        chat_template=flags.model.chat_template,
    )


def _options(flags: Flags, plan: ServicePlan, *, port: int, open_files: int) -> ServeOptions:
    return ServeOptions(
        http=configuration.http_options(
            flags.http,
            served_model_name=plan.model.served_name,
            served_aliases=plan.model.served_aliases,
            own_model_names=plan.model.own_names,
            context_length=flags.model.context_length,
            hostname=socket.gethostname(),
            port=port,
            open_files=open_files,
        ),
        queue=configuration.queue_options(flags),
        worker=WorkerOptions(
            engine=flags.model.engine,
            model_path=plan.model.path,
            trust_remote_code=flags.model.trust_remote_code,
            memory_nbytes=plan.share_nbytes,
            context_length=flags.model.context_length,
            chunked_prefill_size=configuration.chunked_prefill_size(flags.owners),
            prefix_cache=not flags.owners.disable_radix_cache,
            heartbeat_interval_s=flags.owners.heartbeat_interval,
            hang_timeout_s=flags.owners.hang_timeout,
            start_timeout_s=configuration.start_timeout_s(
                flags.owners,
                0 if plan.model.shape is None else plan.model.shape.weights_nbytes,
            ),
            max_restarts=flags.owners.max_restarts,
            restart_window_s=flags.owners.restart_window,
            restart_delay_s=flags.owners.restart_delay,
            log_level=flags.http.log_level,
            distributed_backend=flags.owners.distributed_backend or DistributedBackend.RING,
            shard_vocabulary=flags.owners.enable_dp_lm_head,
            fake=configuration.fake_options(flags.fake),
        ),
        ownership=plan.ownership,
        weights_nbytes=() if plan.weights is None else plan.weights.by_process,
    )


def _announce(
    console: Console, options: ServeOptions, plan: ServicePlan, workers: WorkerEnvironment
) -> None:
    """Print the plan and its warnings, before anything takes time."""
    console.print(plan_view(plan))
    warnings = [*plan.warnings]
    if workers.warning is not None:
        warnings.append(workers.warning)
    if options.http.api_key is None and not is_loopback(options.http.host):
        warnings.append(
            f"--host {options.http.host} is open to everyone who can reach it: set --api-key or "
            "MLX_DP_API_KEY"
        )
    for warning in warnings:
        _warn(console, warning)
    url = endpoint_url(options.http.host, options.http.port)
    write_plain(console, f"mlx-dp: listening on {url} (503 until a worker is ready)")


def _warn(console: Console, warning: str) -> None:
    write_plain(console, f"mlx-dp: warning: {warning}")
