"""Fields for structured output: OpenAI's, and those of other servers."""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from mlx_dp.orchestrator.formats.common.validation import (
    EMPTY_LIST_IS_UNSET,
    EMPTY_TEXT_IS_UNSET,
    STRICT,
    refuse,
)
from mlx_dp.proto.fields import MAX_GRAMMAR_CHARS

MAX_ALTERNATIVES: Final = 1024


def _schema(value: object) -> str:
    """Return a schema as JSON, from an object or from its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise refuse("the text should be JSON of an object") from error
    if not isinstance(value, dict):
        raise refuse("a schema should be a JSON object", value)
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except ValueError as error:
        raise refuse("a schema should be of finite numbers and whole characters") from error
    if len(text) > MAX_GRAMMAR_CHARS:
        raise refuse(f"a schema should have at most {MAX_GRAMMAR_CHARS} characters as JSON")
    return text


ObjectSchema = Annotated[str, BeforeValidator(_schema), WithJsonSchema({"type": "object"})]
AnySchema = Annotated[
    str,
    BeforeValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
# Some clients send all of these fields, and leave those empty that they do not use.
OptionalSchema = Annotated[AnySchema | None, EMPTY_TEXT_IS_UNSET]
GrammarText = Annotated[
    Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None, EMPTY_TEXT_IS_UNSET
]
Alternatives = Annotated[
    Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]],
        Field(max_length=MAX_ALTERNATIVES),
    ]
    | None,
    EMPTY_LIST_IS_UNSET,
]


class JsonSchemaFormat(BaseModel):
    """``strict`` has no effect: a schema is always enforced."""

    model_config = STRICT

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[ObjectSchema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's field, and llama.cpp's variant of ``json_object`` with a schema."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"] | None = None
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[ObjectSchema | None, Field(alias="schema")] = None


class StructuredOutputs(BaseModel):
    """vLLM's field."""

    model_config = STRICT

    json_: Annotated[OptionalSchema, Field(alias="json")] = None
    regex: GrammarText = None
    choice: Alternatives = None
    grammar: GrammarText = None
    json_object: bool | None = None

    @property
    def extras(self) -> dict[str, Any]:
        """Undeclared members."""
        return self.model_extra or {}
