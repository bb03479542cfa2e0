"""The program's entry point: handles signals before the imports, which take most of a second.

It imports little, since an interrupt before ``main`` prints a traceback.
"""

import os
import signal

INTERRUPTED = "mlx-dp: interrupted"


def main() -> None:
    """Run the command line of this process."""
    signal.signal(signal.SIGINT, _interrupted)
    # scripts/serve starts this process with SIGINT blocked, where it can.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    from mlx_dp.orchestrator.process.log_stream import (
        install_dropping_stderr,
        open_standard_descriptors,
    )

    open_standard_descriptors()
    install_dropping_stderr()
    from mlx_dp.orchestrator.cli import commands

    signal.signal(signal.SIGINT, commands.end_by_signal)
    commands.main()


def _interrupted(number: int, frame: object) -> None:
    # Nothing was started yet, so there is nothing to clean up. An exception could be swallowed by
    # a module that is being imported.
    import select

    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{INTERRUPTED}\n".encode())
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    main()
