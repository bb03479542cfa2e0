"""The rows of the fault matrix: the fault that each injects, and what it then asserts."""

from typing import Final

from scripts.faults.rows.death import DEATH_ROWS
from scripts.faults.rows.end import END_ROWS
from scripts.faults.rows.fleet import FLEET_ROWS
from scripts.faults.rows.flood import FLOOD
from scripts.faults.rows.leaving import LEAVING
from scripts.faults.rows.long_prompt import LONG_PROMPT_ROW
from scripts.faults.rows.moment import MOMENT_ROW
from scripts.faults.rows.nonsense import NONSENSE_ROWS
from scripts.faults.rows.service import SERVICE_ROWS
from scripts.faults.rows.slow_reader import SLOW_READER
from scripts.faults.rows.stuck import STUCK_ROWS
from scripts.faults.rows.wire import WIRE_ROW
from scripts.faults.trials.stage import Row

_ALL: Final = (
    *(*DEATH_ROWS, MOMENT_ROW, *STUCK_ROWS, LONG_PROMPT_ROW),
    *(*SERVICE_ROWS, *END_ROWS, *FLEET_ROWS, WIRE_ROW),
    *(LEAVING, SLOW_READER, *NONSENSE_ROWS, FLOOD),
)


def row_number(name: str) -> int:
    return int(name.removeprefix("F"))


ROWS: Final[dict[str, Row]] = {
    row.name: row for row in sorted(_ALL, key=lambda row: row_number(row.name))
}
"""Rows by name, in the order of the matrix."""
