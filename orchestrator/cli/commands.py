"""The command line, and the only place that reads the environment."""

import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from mlx_dp.orchestrator.cli.entry import INTERRUPTED
from mlx_dp.orchestrator.cli.flag_command import expand_home, spread_values, takes_flags
from mlx_dp.orchestrator.cli.plan_table import plan_json, plan_view
from mlx_dp.orchestrator.config import configuration
from mlx_dp.orchestrator.config.flags import API_KEY_VARIABLE, Flags
from mlx_dp.orchestrator.config.plan import ServicePlan, make_plan
from mlx_dp.orchestrator.config.preparation import prepare_model
from mlx_dp.orchestrator.config.remote_plan import plan_remote
from mlx_dp.orchestrator.process.log_stream import EXIT_FLUSH_S, drain_stderr
from mlx_dp.orchestrator.process.stop_signals import (
    EXIT_CONFIG,
    EXIT_SIGNAL_BASE,
    STOP_SIGNALS,
    orderly_status,
)
from mlx_dp.proto.errors import ConfigError

app = typer.Typer(
    name="mlx-dp",
    help="Serve one language model from several MLX processes, behind one OpenAI endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """Run the command line. A configuration error prints one sentence, with status 2."""
    try:
        app(spread_values(sys.argv[1:], "--served-model-name"), prog_name="mlx-dp")
    except ConfigError as error:
        print(f"mlx-dp: error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-dp {importlib.metadata.version('mlx-dp')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command()
@takes_flags
def serve(flags: Flags) -> None:
    """Serve a model from --dp-size worker processes, behind one OpenAI endpoint.

    Without --model it serves a small demo model. Stop it with Ctrl-C or
    SIGTERM: running requests get --drain-timeout seconds to finish. SIGHUP
    restarts the workers one by one, or ends the service if its terminal was
    closed.
    """
    # During the imports there is nothing to clean up, and modules may swallow exceptions.
    _on_stop_signals(_end_early)
    # Imported late: the HTTP side takes a second, which --help and plan should not wait for.
    from mlx_dp.orchestrator.cli.serve import serve as run

    # Until the service runs, a signal unwinds the preparation, whose finally clauses end children.
    _on_stop_signals(end_by_signal)
    sys.exit(run(flags, _environment()))


def _on_stop_signals(act: Callable[[int, object], None]) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, act)


def end_by_signal(number: int, frame: object) -> NoReturn:
    """Unwind the stack, so that everything cleans up; a second signal ends at once."""
    # Unwinding may take long, since it waits for the threads of a download.
    _on_stop_signals(_end_at_once)
    _tell_interrupt(number)
    sys.exit(orderly_status(number))


def _end_early(number: int, frame: object) -> NoReturn:
    _tell_interrupt(number)
    drain_stderr(EXIT_FLUSH_S)
    os._exit(orderly_status(number))


def _tell_interrupt(number: int) -> None:
    # SIGTERM comes from a program, which needs no message.
    if number == signal.SIGINT:
        print(INTERRUPTED, file=sys.stderr)


def _end_at_once(number: int, frame: object) -> NoReturn:
    os._exit(EXIT_SIGNAL_BASE + number)


def _environment() -> Mapping[str, str]:
    """The environment without the API key, which children must not inherit."""
    os.environ.pop(API_KEY_VARIABLE, None)
    return os.environ


@app.command()
@takes_flags
def plan(
    flags: Flags,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what each owner would hold with serve's flags. Starts nothing.

    Lists each owner's request slots, KV tokens and auxiliary states, and
    their bytes. Refuses the same configurations as serve.
    """
    made = _plan(flags, _environment())
    if as_json:
        print(json.dumps(plan_json(made), indent=2))
        return
    Console().print(plan_view(made))
    for warning in made.warnings:
        print(f"mlx-dp: warning: {warning}", file=sys.stderr)


@app.command()
def worker(
    controller: Annotated[
        str, typer.Option(help="tcp://host:port, from the controller's --dist-init-addr.")
    ],
    rank: Annotated[
        int,
        typer.Option(
            help="The rank of this worker among the controller's workers.", envvar="MLX_RANK", min=0
        ),
    ],
    keys: Annotated[
        Path | None, typer.Option(help="Directory with this worker's key and controller.pub.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="The model's directory on this machine. Default: the controller's path."),
    ] = None,
    mem_fraction_static: Annotated[
        float,
        typer.Option(help="The fraction of this machine's device memory that the worker may use."),
    ] = 0.8,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python code from the model's directory on this machine.",
        ),
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    once: Annotated[
        bool,
        typer.Option("--once", help="Exit when the controller is lost, instead of waiting for it."),
    ] = False,
    no_caffeinate: Annotated[
        bool,
        typer.Option("--no-caffeinate", help="On macOS, allow idle sleep meanwhile."),
    ] = False,
) -> None:
    """Run one worker on this machine for a controller on another.

    Starts the worker when the controller asks for it, and ends it when the
    controller is lost.
    """
    _on_stop_signals(_end_early)
    from mlx_dp.orchestrator.cli.worker_command import HostOptions, serve_worker

    _on_stop_signals(end_by_signal)
    options = HostOptions(
        controller=controller,
        rank=rank,
        keys=expand_home(keys),
        model=expand_home(model),
        mem_fraction_static=mem_fraction_static,
        log_level=log_level,
        once=once,
        trust_remote_code=trust_remote_code,
        no_caffeinate=no_caffeinate,
    )
    sys.exit(serve_worker(options, _environment()))


@app.command()
def keys(
    directory: Annotated[Path, typer.Option("--dir", help="The directory to write them to.")],
    name: Annotated[list[str] | None, typer.Option(help="A worker's name. Repeatable.")] = None,
) -> None:
    """Make the keys by which a controller and its remote workers authenticate.

    Overwrites nothing: run it with another --name to add a worker.
    """
    from mlx_dp.proto.wire.key_files import CONTROLLER, write_keys

    directory = expand_home(directory)
    names = name or ["worker"]
    for path in write_keys(directory, names):
        print(path)
    copied = " or ".join(f"{each}.key" for each in names)
    print(
        f"Give serve --keys {directory}. To a worker's machine copy {CONTROLLER}.pub and {copied}, "
        "and give mlx-dp worker their directory as --keys. The .key files are secrets."
    )


def _plan(flags: Flags, environment: Mapping[str, str]) -> ServicePlan:
    """Plan the service. Checks that need no model run before the model is fetched."""
    configuration.check_flags(flags)
    ownership = configuration.ownership(flags.owners)
    plan_remote(flags, ownership)
    model = prepare_model(flags, environment)
    if model.path is not None:
        from mlx_dp.orchestrator.text.loading.tokenizer import load_text_model

        load_text_model(
            model.path,
            trust_remote_code=flags.model.trust_remote_code,
            chat_template=flags.model.chat_template,
        )
    return make_plan(flags, ownership, model)
