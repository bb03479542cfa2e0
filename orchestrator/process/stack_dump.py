"""The signal by which a worker that hangs shows where it is."""

import signal
import sys


def stack_dump_signal(platform: str = sys.platform) -> signal.Signals:
    """Return the signal for which a worker's fault handler writes its stacks.

    SIGABRT ends it as well. On macOS it would also make a crash report, perhaps with a dialog, and
    the system may hold the model's memory meanwhile: there the worker lives on until SIGKILL.
    """
    return signal.SIGUSR1 if platform == "darwin" else signal.SIGABRT
