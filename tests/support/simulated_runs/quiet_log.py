"""Silences the log while thousands of workers die."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_log() -> Iterator[None]:
    """Disable our loggers meanwhile."""
    logger = logging.getLogger("mlx_dp")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
