"""What a structured answer must match."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from mlx_dp.proto.fields import MAX_GRAMMAR_CHARS


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """``text`` is the schema as JSON, the regular expression, or the Lark grammar."""

    kind: GrammarKind
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
