"""Options and fixtures of the simulation."""

import logging
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay this one simulated run")


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Thousands of workers die here, each with its line in the log."""
    logger = logging.getLogger("mlx_dp")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)
