"""The result of a benchmark section: cases, their goals, and their table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.results.report import median, paired_ratio, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The bound for a ratio."""

    at_least: float | None = None
    at_most: float | None = None

    def judge(self, ratio: float) -> str:
        wanted, met = [], True
        if self.at_least is not None:
            wanted.append(f">= {self.at_least}")
            met = met and ratio >= self.at_least
        if self.at_most is not None:
            wanted.append(f"<= {self.at_most}")
            met = met and ratio <= self.at_most
        return f"{' and '.join(wanted)}: {'met' if met else 'MISSED'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line: the value of each round, and the base of its ratio."""

    name: str
    measured: Sequence[float]
    base: Sequence[float]
    show: Callable[[float], str]
    goal: Goal | None = None

    @property
    def ratio(self) -> float:
        return paired_ratio(self.measured, self.base)

    def row(self) -> list[str]:
        return [
            self.name,
            self.show(median(self.measured)),
            self.show(median(self.base)),
            f"{self.ratio:.3f}x",
            "" if self.goal is None else self.goal.judge(self.ratio),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """``columns``: the headings of the value and of its base."""

    title: str
    columns: tuple[str, str]
    cases: Sequence[Case]

    def markdown(self) -> str:
        headers = ["", *self.columns, "ratio", "goal"]
        return f"### {self.title}\n\n{table(headers, [case.row() for case in self.cases])}\n"

    def as_json(self) -> Mapping[str, Any]:
        return {
            "title": self.title,
            "columns": self.columns,
            "cases": {
                case.name: {
                    "measured": list(case.measured),
                    "base": list(case.base),
                    "ratio": case.ratio,
                    "goal": None if case.goal is None else case.goal.judge(case.ratio),
                }
                for case in self.cases
            },
        }


def tokens_per_s(value: float) -> str:
    return f"{value:.1f} tokens/s"


def fine_milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
