"""The tables of the conformance suite, printed at the end of the session.

A plugin of its own: the parent of a parallel run collects nothing, so it loads no conftest of a
folder; and its workers print nothing, so they hand their lines to it.
"""

from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from tests.support.conformance.rank_verdicts import RankTable
    from tests.support.conformance.verdicts import Table

TABLES: Final[pytest.StashKey[dict[str, Any]]] = pytest.StashKey()
LINES: Final[pytest.StashKey[dict[str, list[str]]]] = pytest.StashKey()
"""Lines of the workers of a parallel run, by the title of their table."""
OUTPUT: Final = "conformance"


def _tables(config: pytest.Config) -> dict[str, Any]:
    return config.stash.setdefault(TABLES, {})


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> "Table":
    from tests.support.conformance.verdicts import Table

    table: Table = _tables(pytestconfig).setdefault("architectures", Table())
    return table


@pytest.fixture(scope="session")
def rank_table(pytestconfig: pytest.Config) -> "RankTable":
    from tests.support.conformance.rank_verdicts import RankTable

    table: RankTable = _tables(pytestconfig).setdefault("architectures on ranks", RankTable())
    return table


def _lines(config: pytest.Config) -> dict[str, list[str]]:
    return {
        title: str(table).splitlines() for title, table in _tables(config).items() if table.lines
    }


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[OUTPUT] = _lines(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A worker that crashed has no output.
    given = getattr(node, "workeroutput", {}).get(OUTPUT, {})
    for title, lines in given.items():
        node.config.stash.setdefault(LINES, {}).setdefault(title, []).extend(lines)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for title, lines in {**_lines(config), **config.stash.get(LINES, {})}.items():
        terminalreporter.section(title)
        terminalreporter.write_line("\n".join(sorted(lines)))
