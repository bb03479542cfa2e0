"""The exit statuses of this program."""

import signal
from typing import Final

EXIT_FAILED: Final = 1
"""It could not go on."""
EXIT_CONFIG: Final = 2
"""Something that it was given is wrong: another try would end alike."""
EXIT_SIGNAL_BASE: Final = 128
"""Plus the signal's number: the status of an end at once."""


def orderly_status(number: int) -> int:
    """Return the status of an end that had its time: 0, but 130 for Ctrl-C, as of any program."""
    return EXIT_SIGNAL_BASE + number if number == signal.SIGINT else 0
