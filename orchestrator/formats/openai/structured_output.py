"""Selects the one grammar that an answer must match, from the fields that may state it."""

import json
from collections.abc import Iterator, Sequence
from typing import Final

from mlx_dp.orchestrator.formats.common.errors import invalid, shown_name, unsupported
from mlx_dp.orchestrator.formats.common.generation_request import RequestedGrammar
from mlx_dp.orchestrator.formats.openai.fields import CompletionFields
from mlx_dp.orchestrator.formats.openai.structured_fields import ResponseFormat, StructuredOutputs
from mlx_dp.proto.fields import MAX_GRAMMAR_CHARS
from mlx_dp.proto.messages.grammar import Grammar, GrammarKind

_ANY_OBJECT: Final = '{"type":"object"}'
# Defines a rule in llama.cpp's and XGrammar's dialects, and never occurs in Lark.
_OTHER_DIALECTS: Final = "::="
_IGNORED: Final = frozenset({"disable_fallback", "backend", "_backend", "_backend_was_auto"})


def requested_grammar(fields: CompletionFields) -> RequestedGrammar | None:
    """Return the grammar, or None. Raises ApiError when two fields ask for different ones."""
    found = list(_requested(fields))
    if not found:
        return None
    first, *others = found
    for other in others:
        if not _same(first.grammar, other.grammar):
            raise invalid(
                other.param, f"{first.param} already asks for a different form: use one of them"
            )
    if fields.ignore_eos:
        raise invalid("ignore_eos", f"{first.param} decides where the answer ends: leave it out")
    return first


def _same(one: Grammar, other: Grammar) -> bool:
    """Whether an older and a newer field state the same grammar."""
    if one.kind is not other.kind:
        return False
    if one.kind is not GrammarKind.JSON_SCHEMA:
        return one.text == other.text
    return _canonical(one.text) == _canonical(other.text)


def _canonical(schema: str) -> str:
    # Compared as text, since 1 == true in Python.
    return json.dumps(json.loads(schema), sort_keys=True)


def _requested(fields: CompletionFields) -> Iterator[RequestedGrammar]:
    if fields.response_format is not None:
        yield from _from_response_format(fields.response_format)
    if fields.structured_outputs is not None:
        yield from _from_structured_outputs(fields.structured_outputs)
    for name, schema in (("guided_json", fields.guided_json), ("json_schema", fields.json_schema)):
        if schema is not None:
            yield _json_schema(name, schema)
    for name, regex in (("guided_regex", fields.guided_regex), ("regex", fields.regex)):
        if regex is not None:
            yield _regex(name, regex)
    if fields.guided_choice is not None:
        yield _choice("guided_choice", fields.guided_choice)
    for name, text in (("guided_grammar", fields.guided_grammar), ("grammar", fields.grammar)):
        if text is not None:
            yield _lark(name, text)


def _from_response_format(asked: ResponseFormat) -> Iterator[RequestedGrammar]:
    match asked.type:
        case None if asked.json_schema is not None or asked.schema_ is not None:
            raise invalid("response_format.type", "this field is required")
        case None | "text":
            return
        case "json_object":
            yield _json_schema("response_format", asked.schema_ or _ANY_OBJECT)
        case "json_schema":
            if asked.json_schema is None:
                raise invalid("response_format.json_schema", "this field is required")
            yield _json_schema("response_format.json_schema.schema", asked.json_schema.schema_)


def _from_structured_outputs(asked: StructuredOutputs) -> Iterator[RequestedGrammar]:
    for name, value in asked.extras.items():
        if value not in (None, False) and name not in _IGNORED:
            raise unsupported(f"structured_outputs.{shown_name(name)}", value, "leave it out")
    if asked.json_ is not None:
        yield _json_schema("structured_outputs.json", asked.json_)
    if asked.json_object:
        yield _json_schema("structured_outputs.json_object", _ANY_OBJECT)
    if asked.regex is not None:
        yield _regex("structured_outputs.regex", asked.regex)
    if asked.choice is not None:
        yield _choice("structured_outputs.choice", asked.choice)
    if asked.grammar is not None:
        yield _lark("structured_outputs.grammar", asked.grammar)


def _json_schema(param: str, schema: str) -> RequestedGrammar:
    return RequestedGrammar(param=param, grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema))


def _regex(param: str, regex: str) -> RequestedGrammar:
    return RequestedGrammar(param=param, grammar=Grammar(kind=GrammarKind.REGEX, text=regex))


def _choice(param: str, alternatives: Sequence[str]) -> RequestedGrammar:
    # Lark writes strings as JSON does.
    strings = [json.dumps(each, ensure_ascii=False) for each in alternatives]
    text = f"start: {' | '.join(strings)}"
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(
            param, f"its strings should have at most {MAX_GRAMMAR_CHARS} characters in all"
        )
    return RequestedGrammar(param=param, grammar=Grammar(kind=GrammarKind.LARK, text=text))


def _lark(param: str, text: str) -> RequestedGrammar:
    if _OTHER_DIALECTS in text:
        raise invalid(
            param,
            "this is a grammar in GBNF or EBNF (it has '::='), and only Lark grammars are "
            "understood",
        )
    return RequestedGrammar(param=param, grammar=Grammar(kind=GrammarKind.LARK, text=text))
