"""Architectures that cannot be sharded, and the table of those that ranks have served."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

REFUSALS: Final[Mapping[str, str]] = {
    "gemma3n": "no sum of its shards",
    "prism_hadamard_qwen35": "HadamardQuantizedLinear, of which no part can be taken",
    "mamba": "no layer has an MLP or experts",
    "mamba2": "no layer has an MLP or experts",
    "falcon_mamba": "no layer has an MLP or experts",
    "rwkv7": "no layer has an MLP or experts",
}
"""Part of the reason with which each of them must be refused."""


@dataclass(slots=True)
class RankLine:
    """The results of one architecture on this many ranks."""

    refusal: str = ""
    blocks: int = 0
    passes: int = 0
    compared: int = 0
    ties: int = 0
    whole_nbytes: int = 0
    held_nbytes: int = 0
    cut_nbytes: int = 0

    def __str__(self) -> str:
        if self.refusal:
            return f"refused: {self.refusal}"
        return (
            f"{self.blocks} blocks, {self.held_nbytes} of {self.whole_nbytes} bytes a rank "
            f"({self.cut_nbytes} are divided), {self.compared} tokens equal, {self.ties} ties, "
            f"{self.passes} passes"
        )


@dataclass(slots=True)
class RankTable:
    """One line per architecture and number of ranks, printed at the end of the session."""

    lines: dict[str, RankLine] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max(map(len, self.lines), default=0)
        return "\n".join(f"{name:{width}} {line}" for name, line in sorted(self.lines.items()))
