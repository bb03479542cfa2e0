"""Options and fixtures of the simulation."""

from collections.abc import Iterator

import pytest

from tests.support.simulated_runs.quiet_log import quiet_log
from tests.support.simulation.schedule import Drawn


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay this one simulated run")
    parser.addoption(
        "--draw",
        type=Drawn,
        choices=tuple(Drawn),
        default=Drawn.ALL,
        help="kinds of faults in it (default all)",
    )


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> Drawn:
    chosen: Drawn = request.config.getoption("--draw")
    return chosen


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet_log():
        yield
