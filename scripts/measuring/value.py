"""One measured value, with its bound."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from scripts.faults.trials.stage import Row, Stage


@dataclass(frozen=True, slots=True)
class Measured:
    """A formatted value. Without a bound it is for information only."""

    name: str
    value: str
    bound: str = ""
    kept: bool = True

    @classmethod
    def bounded(
        cls, name: str, value: float, bound: float, show: Callable[[float], str]
    ) -> "Measured":
        """Compare a value with its upper bound; a value that was not measured (NaN) fails."""
        return cls(name, show(value), f"<= {show(bound)}", value <= bound)

    def cells(self) -> list[str]:
        return [self.name, self.value, self.bound, "" if self.kept else "NOT KEPT"]


def row_of(name: str, trial: Callable[[Stage], Awaitable[None]]) -> Row:
    """A trial of the matrix, without bounds: the measure has its own."""
    return Row(name=name, title="", trial=trial)
