"""One measured value, with the bound that it is held to."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from scripts.faults.trials.stage import Row, Stage


@dataclass(frozen=True, slots=True)
class Measured:
    """A value as it is shown. Without a bound it is there to be read."""

    name: str
    value: str
    bound: str = ""
    kept: bool = True

    @classmethod
    def bounded(
        cls, name: str, value: float, bound: float, show: Callable[[float], str]
    ) -> "Measured":
        """Hold a value to its upper bound; what was not measured (NaN) does not keep it."""
        return cls(name, show(value), f"<= {show(bound)}", value <= bound)

    def cells(self) -> list[str]:
        return [self.name, self.value, self.bound, "" if self.kept else "NOT KEPT"]


def row_of(name: str, trial: Callable[[Stage], Awaitable[None]]) -> Row:
    """A trial of the matrix, without bounds: the measure has its own."""
    return Row(name=name, title="", trial=trial)
