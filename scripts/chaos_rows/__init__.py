"""The rows of the fault matrix: how each harms a service, and what it then asserts."""

from typing import Final

from chaos_stage import Row

from chaos_rows.death import DEATH_ROWS
from chaos_rows.end import END_ROWS
from chaos_rows.fleet import FLEET_ROWS
from chaos_rows.flood import FLOOD
from chaos_rows.leaving import LEAVING
from chaos_rows.long_prompt import LONG_PROMPT_ROW
from chaos_rows.moment import MOMENT_ROW
from chaos_rows.nonsense import NONSENSE_ROWS
from chaos_rows.service import SERVICE_ROWS
from chaos_rows.slow_reader import SLOW_READER
from chaos_rows.stuck import STUCK_ROWS
from chaos_rows.wire import WIRE_ROW

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
"""By name, in the order of the matrix."""
