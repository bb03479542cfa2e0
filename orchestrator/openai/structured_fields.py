"""Fields that ask for an answer of a certain form, in OpenAI's words and in other servers'."""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from mlx_dp.orchestrator.openai.validation import STRICT, refuse
from mlx_dp.proto.fields import MAX_GRAMMAR_CHARS

MAX_ALTERNATIVES: Final = 1024


def _schema(value: object) -> str:
    """A schema as JSON, from an object or from text of one."""
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
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Alternatives = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]],
    Field(min_length=1, max_length=MAX_ALTERNATIVES),
]


class JsonSchemaFormat(BaseModel):
    """``strict`` changes nothing: a schema is always followed."""

    model_config = STRICT

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[ObjectSchema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's, and llama.cpp's ``json_object`` with a schema of its own."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[ObjectSchema | None, Field(alias="schema")] = None


class StructuredOutputs(BaseModel):
    """vLLM's."""

    model_config = STRICT

    json_: Annotated[AnySchema | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Alternatives | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None

    @property
    def extras(self) -> dict[str, Any]:
        """Members that are not declared here."""
        return self.model_extra or {}
