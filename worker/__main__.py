"""The worker process, and helper processes that need MLX: ``python -m mlx_dp.worker COMMAND``.

Imports only the standard library and the parent watch until the watch has started.
"""

import argparse
import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mlx_dp.proto.descriptor_limit import check_descriptor_limit
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.worker.parent_output import print_to_parent
from mlx_dp.worker.parent_watch import watch_parent

LAST_WORDS_S: Final = 2.0
"""The time for the last message to leave before the process ends anyway."""


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["convert", *rest]:
            arguments = _watched(rest)
            from mlx_dp.worker.gguf import convert

            return convert.main(arguments)
        case ["probe", *rest]:
            arguments = _watched(rest)
            try:
                check_descriptor_limit()
            except ConfigError as error:
                print(json.dumps({"error": str(error)}))
                return 1
            # It imports mlx-lm.
            from mlx_dp.worker import model_probe

            return model_probe.main(arguments)
        case _:
            return _serve(_parser().parse_args(argv))


def _watch_parser(*, required: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--parent-pid", type=int, required=required, help="end when this process ends"
    )
    parser.add_argument(
        "--death-fd",
        type=int,
        required=required,
        help="descriptor of a pipe that ends with the parent",
    )
    return parser


def _watched(argv: list[str]) -> list[str]:
    """Start the parent watch if the arguments ask for it; return the remaining arguments."""
    arguments, rest = _watch_parser(required=False).parse_known_args(argv)
    if arguments.parent_pid is not None and arguments.death_fd is not None:
        _leave_signals_to_parent()
        watch_parent(arguments.parent_pid, arguments.death_fd)
    return rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_dp.worker", description="Started by mlx-dp, not by hand."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        parents=[_watch_parser(required=True)],
        help="run a worker for the controller that starts this",
    )
    serve.add_argument("--endpoint", required=True, help="the controller's address")
    serve.add_argument("--identity", required=True, help="owner and incarnation, never used twice")
    serve.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    serve.add_argument(
        "--keys", type=Path, help="directory of the keys, for a controller on another machine"
    )
    serve.add_argument(
        "--model-path", help="the model's path on this host (default: the controller's)"
    )
    serve.add_argument("--memory-nbytes", type=int, help="this worker's share of its device")
    serve.add_argument(
        "--trust-remote-code",
        action=argparse.BooleanOptionalAction,
        help="whether code of the model may run on this host (default: the controller's choice)",
    )
    commands.add_parser("convert", add_help=False, help="make a model directory of a GGUF file")
    commands.add_parser("probe", add_help=False, help="measure a model without serving it")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    _leave_signals_to_parent()
    print_to_parent()
    # A hung worker first gets SIGABRT, which prints every thread's stack.
    faulthandler.enable()
    # On macOS it gets SIGUSR1, which it survives.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        watch_parent(arguments.parent_pid, arguments.death_fd)
    except OSError as error:
        print(f"--death-fd {arguments.death_fd}: {error}", file=sys.stderr)
        return ExitCode.USAGE
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format=f"%(asctime)s %(levelname)s worker {arguments.identity} %(name)s: %(message)s",
    )
    from mlx_dp.proto.wire.key_files import read_worker_keys
    from mlx_dp.proto.wire.worker_channel import WorkerChannel
    from mlx_dp.worker.host_overrides import HostOverrides
    from mlx_dp.worker.startup import run_worker

    keys = None if arguments.keys is None else read_worker_keys(arguments.keys)
    channel = WorkerChannel(arguments.endpoint, arguments.identity, keys)
    overrides = HostOverrides(
        model_path=arguments.model_path,
        memory_nbytes=arguments.memory_nbytes,
        trust_remote_code=arguments.trust_remote_code,
    )
    try:
        return run_worker(channel, overrides)
    finally:
        channel.close(linger_s=LAST_WORDS_S)


def _leave_signals_to_parent() -> None:
    """Ignore the signals that go to all processes of a service: the controller decides.

    Shutdown, the controller's exit and SIGKILL end this process.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The controller starts us with these signals blocked, so there is no gap before this.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
