"""Fixtures of the conformance suite, and its table at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.model_under_test import ModelUnderTest
    from conformance.rank_verdicts import RankTable
    from conformance.verdicts import Table

_TABLE: pytest.StashKey[Any] = pytest.StashKey()
_RANK_TABLE: pytest.StashKey[Any] = pytest.StashKey()


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> "Table":
    from conformance.verdicts import Table

    return pytestconfig.stash.setdefault(_TABLE, Table())


@pytest.fixture(scope="session")
def rank_table(pytestconfig: pytest.Config) -> "RankTable":
    from conformance.rank_verdicts import RankTable

    return pytestconfig.stash.setdefault(_RANK_TABLE, RankTable())


@pytest.fixture(scope="session")
def under_test() -> Iterator[Callable[[str], "ModelUnderTest"]]:
    """Returns a model by its name, and keeps the last one: its scenarios run one after another."""
    from conformance.model_under_test import ModelUnderTest

    last: list[ModelUnderTest] = []
    with TemporaryDirectory() as scratch:

        def model(name: str) -> ModelUnderTest:
            if not last or last[0].name != name:
                last[:] = [ModelUnderTest(name, Path(scratch) / name)]
            return last[0]

        yield model


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for title, key in (("architectures", _TABLE), ("architectures on ranks", _RANK_TABLE)):
        table = config.stash.get(key, None)
        if table is not None and table.lines:
            terminalreporter.section(title)
            terminalreporter.write_line(str(table))
