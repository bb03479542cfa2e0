"""The grammar that a structured answer must match."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from mlx_dp.proto.fields import MAX_GRAMMAR_CHARS

MAX_COMPLAINT_CHARS: Final = 160


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """``text`` is the schema as JSON, the regular expression, or the Lark grammar."""

    kind: GrammarKind
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


def complaint_line(message: str) -> str:
    """Return the essential line of a compiler's error, short and in printable ASCII.

    The parser of patterns quotes the whole pattern first.
    """
    lines = message.strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (errors or lines or [""])[0].encode("ascii", "backslashreplace").decode()
    shown = "".join(char if char.isprintable() else " " for char in line)
    return shown if len(shown) <= MAX_COMPLAINT_CHARS else f"{shown[:MAX_COMPLAINT_CHARS]}..."
