"""State transitions: a life cycle is a table; an illegal step is an error that names both sides."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

Status = TypeVar("Status", bound=StrEnum)


class IllegalStepError(Exception):
    """A step that the life cycle does not have.

    It is an internal error, never the fault of a worker or a client.
    """

    def __init__(self, what: str, number: int, status: StrEnum, wanted: StrEnum) -> None:
        super().__init__(f"{what} {number}: a {status.value} {what} cannot become {wanted.value}")
        self.number = number
        self.status = status
        self.wanted = wanted


def step(
    table: Mapping[Status, frozenset[Status]], what: str, number: int, status: Status, to: Status
) -> Status:
    """Return the new status, or raise IllegalStepError."""
    if to not in table[status]:
        raise IllegalStepError(what, number, status, to)
    return to
