"""The exit statuses of a program that a signal ends."""

import signal
from typing import Final

EXIT_SIGNAL_BASE: Final = 128
"""Plus the signal's number: the status of an end at once."""


def orderly_status(number: int) -> int:
    """Return the status of an end that had its time: 0, but 130 for Ctrl-C, as of any program."""
    return EXIT_SIGNAL_BASE + number if number == signal.SIGINT else 0
