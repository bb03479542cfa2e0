"""Silence, while thousands of workers die, each with its line in the log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_log() -> Iterator[None]:
    """Let nothing of ours be logged meanwhile."""
    logger = logging.getLogger("mlx_dp")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
