"""Options and fixtures of the simulation."""

from collections.abc import Iterator

import pytest

from faults.quiet_log import quiet_log


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay this one simulated run")


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet_log():
        yield
