"""The required way to serve each architecture, and the table of the actual ways."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from mlx_dp.kvcache.batch.batch_form import BatchForm
from tests.support.architectures.broken import CHUNK_DEPENDENT


class Verdict(IntEnum):
    """From worst to best."""

    REFUSED = 0
    ONE_ROW = 1
    ONE_SLAB = 2
    SEVERAL_SLABS = 3


_ONE_ROW: Final = frozenset(
    {
        "afm7",
        "deepseek_v41",
        "gpt_bigcode",
        "llama4",
        "llama_dynamic_rope",
        "minimax_m3_vl",
        "phi3small",
    }
)
_ONE_SLAB: Final = frozenset(
    {
        "bailing_hybrid",
        "bailing_moe_v3",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v32_sparse",
        "deepseek_v3_query_rank",
        "gemma2",
        "gemma4",
        "gemma4_text",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "glm_moe_dsa_sparse",
        "iquestloopcoder",
        "kimi_k25",
        "kimi_k3",
        "kimi_k3_residual",
        "kimi_linear",
        "kimi_vl",
        "longcat_flash",
        "longcat_flash_ngram",
        "mistral3_ministral",
        "mistral4",
        "plamo",
        "plamo2",
        "plamo3",
        "stablelm",
    }
)


def least(name: str) -> Verdict:
    """The least acceptable way to serve an architecture; a better one passes."""
    if name in _ONE_ROW:
        return Verdict.ONE_ROW
    return Verdict.ONE_SLAB if name in _ONE_SLAB else Verdict.SEVERAL_SLABS


def resumes(name: str) -> bool:
    """Whether its prefixes must be cached."""
    return least(name) > Verdict.ONE_ROW and name not in CHUNK_DEPENDENT


def verdict(form: BatchForm | None) -> Verdict:
    if form is None:
        return Verdict.REFUSED
    if form.single:
        return Verdict.ONE_ROW
    return Verdict.SEVERAL_SLABS if form.split else Verdict.ONE_SLAB


@dataclass(slots=True)
class Line:
    """The results of one architecture after its scenarios."""

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
