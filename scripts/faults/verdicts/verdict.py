"""The expected and the actual response, and the sum over a row's trials."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isinf

from scripts.benchmarks.results.report import milliseconds, quantile, table
from scripts.faults.service.client import Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Differences of a text from its expectation, in characters; ``wrong``: of any other kind."""

    lost: int = 0
    repeated: int = 0
    wrong: int = 0


SAME = Difference()


def compare(expected: str, got: str) -> Difference:
    """Tell one cut and one repetition from any other difference."""
    if got == expected:
        return SAME
    start = next(
        (at for at, (one, other) in enumerate(zip(expected, got, strict=False)) if one != other),
        min(len(expected), len(got)),
    )
    gap = len(expected) - len(got)
    if gap > 0 and expected[start + gap :] == got[start:]:
        return Difference(lost=gap)
    # The repeated part may match the expected text for a while, so that it shows later.
    if gap < 0 and got[start - gap :] == expected[start:]:
        return Difference(repeated=-gap)
    return Difference(wrong=max(len(expected), len(got)) - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expected response, a text for each choice.

    ``usage``: tokens of the prompt, and of all choices. ``tokens``: those of the
    log-probabilities, where requested.
    """

    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    usage: tuple[int, int]
    tokens: tuple[str, ...] | None = None

    @classmethod
    def of(cls, seen: Seen) -> "Expected":
        """The response of an undisturbed run."""
        choices = range(seen.ask.n)
        shown = seen.ask.logprobs is not None
        return cls(
            texts=tuple(seen.texts[choice] for choice in choices),
            finish_reasons=tuple(seen.finish_reasons),
            usage=seen.usage,
            tokens=tuple(seen.tokens[choice] for choice in choices) if shown else None,
        )


def faults_of(seen: Seen, expected: Expected) -> list[str]:
    """Everything except the texts that is wrong with a request that should have succeeded."""
    if seen.error:
        return [f"failed: {seen.error}"]
    faults = []
    if seen.done != 1:
        faults.append(f"{seen.done} [DONE] in place of 1")
    if seen.after_done:
        faults.append("events after [DONE]")
    if len(seen.ids) > 1:
        faults.append(f"the id changed within the stream: {sorted(seen.ids)}")
    if seen.roles != (roles := seen.ask.n * (seen.ask.chat and seen.ask.stream)):
        faults.append(f"the role was sent {seen.roles} times in place of {roles}")
    if sorted(seen.finish_reasons) != sorted(expected.finish_reasons):
        faults.append(f"finish reasons {seen.finish_reasons}, not {expected.finish_reasons}")
    if seen.usage != expected.usage:
        faults.append(f"usage {seen.usage}, not {expected.usage}")
    if expected.tokens is not None:
        tokens = tuple(seen.tokens[choice] for choice in range(seen.ask.n))
        if tokens != expected.tokens:
            faults.append(f"log-probabilities of {tokens}, not of {expected.tokens}")
    return faults


@dataclass(slots=True)
class RowResult:
    """The findings of one row's trials. ``left`` counts leftovers by kind."""

    row: str
    title: str
    trials: int = 0
    requests: int = 0
    lost: int = 0
    repeated: int = 0
    failed: int = 0
    refused: int = 0
    detection_s: list[float] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    """The longest gap of each stream that a loss did not touch."""
    calm_gap_s: list[float] = field(default_factory=list)
    """The same, before any fault."""
    grants: Counter[str] = field(default_factory=Counter)
    """Requests by receiving worker, where a row compares that."""
    left: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def violate(self, text: str) -> None:
        """Record a violation, with its trial."""
        self.violations.append(f"{self.row}, trial {self.trials}: {text}")

    def take(self, seen: Seen, expected: Expected) -> None:
        """Judge a request that should have succeeded as if no fault had happened."""
        self.requests += 1
        self.failed += bool(seen.error)
        faults = faults_of(seen, expected)
        for choice, text in enumerate(expected.texts):
            got = seen.texts[choice]
            difference = SAME if seen.error else compare(text, got)
            self.lost += difference.lost
            self.repeated += difference.repeated
            if difference != SAME:
                faults.append(f"{difference}: {got!r} in place of {text!r}")
        for fault in faults:
            self.violate(f"{seen.ask}: {fault}")

    def leave(self, kind: str, count: int, what: object = "") -> None:
        """Count leftovers; each kind should be 0."""
        if count > 0:
            self.left[kind] += count
            self.violate(f"{count} {kind} left {what}")

    def bound(self, name: str, values_s: Sequence[float], bound_s: float) -> None:
        """Check the 99th percentile against its bound. Without a value the bound is not kept."""
        if isinf(bound_s):
            return
        if not values_s:
            self.violations.append(f"{self.row}: {name} was never measured")
        elif (p99 := quantile(values_s, 0.99)) > bound_s:
            self.violations.append(
                f"{self.row}: {name} p99 {milliseconds(p99)}, allowed {milliseconds(bound_s)}"
            )

    def cells(self) -> list[str]:
        times = [
            milliseconds(quantile(values, q)) if values else "-"
            for values in (self.detection_s, self.recovery_s)
            for q in (0.5, 0.99)
        ]
        gap = milliseconds(quantile(self.gap_s, 0.99)) if self.gap_s else "-"
        left = "/".join(str(self.left[kind]) for kind in ("processes", "files", "fds"))
        counts = (
            *(self.trials, self.requests, self.lost, self.repeated),
            *(self.failed, self.refused),
        )
        return [
            f"{self.row} {self.title}",
            *map(str, counts),
            *times,
            gap,
            left,
            str(len(self.violations)),
        ]


HEADERS = (
    *("row", "trials", "requests", "lost", "repeated", "failed", "refused"),
    *("detected p50", "p99", "recovered p50", "p99", "untouched gap p99"),
    *("processes/files/fds left", "violations"),
)


def matrix(results: Sequence[RowResult]) -> str:
    """The table of all rows."""
    return table(HEADERS, [result.cells() for result in results])
