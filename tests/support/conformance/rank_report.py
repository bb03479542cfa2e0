"""A rank's job with a model, and its report: one line of JSON each."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """``place`` are the fields of a GroupPlace; ``scenario`` names the clients' requests.

    ``warm_up``: whether the start runs the warm-up, which takes longer than the scenario.
    """

    directory: Path
    place: dict[str, Any]
    scenario: str
    chunk: int
    warm_up: bool

    def encode(self) -> str:
        return json.dumps({**asdict(self), "directory": str(self.directory)})

    @classmethod
    def decode(cls, line: str) -> "RankJob":
        fields = json.loads(line)
        return cls(**{**fields, "directory": Path(fields["directory"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """``answers`` are pairs of prompt and tokens. ``refusal`` "": the model was served.

    ``held_nbytes`` is counted from the rank's arrays, ``told_nbytes`` is the reported number,
    and ``block_nbytes`` of the arrays are in its blocks.
    """

    refusal: str = ""
    form: str = ""
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    held_nbytes: int = 0
    told_nbytes: int = 0
    block_nbytes: int = 0
    blocks: int = 0
    calls: int = 0
    most_together: int = 0
    passes: int = 0
    idle_passes: int = 0
    leftovers: tuple[int, ...] = ()

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, line: str) -> "RankReport":
        return cls(**json.loads(line))
