"""How each architecture is expected to be served, and the table of how it was."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_dp.kvcache.batch_form import BatchForm


class Verdict(StrEnum):
    BATCHED = "batched"
    ONE_ROW = "one row at a time"
    REFUSED = "refused"


EXCEPTIONS: Mapping[str, Verdict] = {
    "llama_dynamic_rope": Verdict.ONE_ROW,
}
"""All others must be batched."""


def expected(name: str) -> Verdict:
    return EXCEPTIONS.get(name, Verdict.BATCHED)


def verdict(form: BatchForm | None) -> Verdict:
    if form is None:
        return Verdict.REFUSED
    return Verdict.ONE_ROW if form.single else Verdict.BATCHED


@dataclass(slots=True)
class Line:
    """What is known of one architecture after its scenarios."""

    cache_kinds: tuple[str, ...]
    outcome: str = ""
    scenarios: int = 0
    compared: int = 0
    ties: int = 0
    cached_tokens: int = 0
    preempted: int = 0

    def __str__(self) -> str:
        counts = (
            f"{self.scenarios} scenarios, {self.compared} tokens equal, {self.ties} ties, "
            f"{self.cached_tokens} from the cache, {self.preempted} preempted"
        )
        return f"{' + '.join(self.cache_kinds):32} {self.outcome}" + (
            f" ({counts})" if self.scenarios else ""
        )


@dataclass(slots=True)
class Table:
    """One line per architecture, printed at the end of the session."""

    lines: dict[str, Line] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max(map(len, self.lines), default=0)
        return "\n".join(f"{name:{width}} {line}" for name, line in sorted(self.lines.items()))
