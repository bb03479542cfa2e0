"""Where the program starts: what must hold before the imports, which take most of a second."""

import os
import select
import signal
from contextlib import suppress
from typing import Final, NoReturn

from mlx_dp.orchestrator.process.stop_status import INTERRUPTED, orderly_status

_STDERR: Final = 2


def main() -> None:
    """Run the command line of this process."""
    signal.signal(signal.SIGINT, _interrupted)
    from mlx_dp.orchestrator.process.log_stream import (
        install_dropping_stderr,
        open_standard_descriptors,
    )

    open_standard_descriptors()
    install_dropping_stderr()
    from mlx_dp.orchestrator import cli

    signal.signal(signal.SIGINT, cli.end_by_signal)
    cli.main()


def _interrupted(number: int, frame: object) -> NoReturn:
    # Nothing has been started yet, so that there is nothing to clean up. An exception in place of
    # this might be swallowed by a module that is just being imported.
    with suppress(OSError):
        if select.select([], [_STDERR], [], 0)[1]:
            os.write(_STDERR, f"{INTERRUPTED}\n".encode())
    os._exit(orderly_status(number))
