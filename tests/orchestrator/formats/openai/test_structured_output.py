"""Fields that ask for structured output, their grammars, and refusals before the queue."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.text_model import ModelFacts
from mlx_dp.proto.fields import MAX_GRAMMAR_CHARS
from mlx_dp.proto.messages.grammar import Grammar, GrammarKind
from tests.support.http.http_calls import CHAT, HI, call, error
from tests.support.http.scripted_service import ScriptedService

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
ANY_OBJECT = '{"type":"object"}'
LARK = 'start: "a" | "b"'


class FollowingModel(FakeTextModel):
    """As the text side of a model whose engine follows grammars."""

    @property
    def facts(self) -> ModelFacts:
        return replace(super().facts, follows_grammars=True)


def send(service: ScriptedService, path: str = CHAT, **fields: Any) -> Any:
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    return call(service, "POST", path, text=FollowingModel(512), json={**body, **fields})


def named(schema: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


ACCEPTED: list[tuple[dict[str, Any], GrammarKind, str]] = [
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, ANY_OBJECT),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        GrammarKind.JSON_SCHEMA,
        SCHEMA_TEXT,
    ),
    ({"response_format": named(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
    ({"response_format": named(SCHEMA, strict=True)}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
    ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
    ({"guided_json": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
    ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
    ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA, ANY_OBJECT),
    ({"guided_regex": "[0-9]+"}, GrammarKind.REGEX, "[0-9]+"),
    ({"regex": "[0-9]+"}, GrammarKind.REGEX, "[0-9]+"),
    ({"structured_outputs": {"regex": "[0-9]+"}}, GrammarKind.REGEX, "[0-9]+"),
    ({"guided_grammar": LARK}, GrammarKind.LARK, LARK),
    ({"grammar": LARK}, GrammarKind.LARK, LARK),
    ({"structured_outputs": {"grammar": LARK}}, GrammarKind.LARK, LARK),
    ({"guided_choice": ["a", "b"]}, GrammarKind.LARK, LARK),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.LARK, LARK),
]


@pytest.mark.parametrize(("fields", "kind", "text"), ACCEPTED)
def test_each_way_to_ask_becomes_the_grammar_of_the_generation(
    fields: dict[str, Any], kind: GrammarKind, text: str
) -> None:
    for path in (CHAT, "/v1/completions"):
        service = ScriptedService()
        assert send(service, path, **fields).status_code == 200
        assert service.generation.grammar == Grammar(kind=kind, text=text)


NEUTRAL: list[dict[str, Any]] = [
    {},
    {"response_format": None},
    {"response_format": {"type": "text"}},
    {"guided_json": None, "guided_regex": None, "structured_outputs": None},
    {"structured_outputs": {"json_object": False, "json": None, "disable_fallback": True}},
    {"guided_decoding_backend": "xgrammar"},
    {"response_format": {}},
    {"grammar": "", "guided_grammar": "", "regex": "", "guided_regex": ""},
    {"json_schema": "", "guided_json": "", "guided_choice": []},
    {"structured_outputs": {"json": "", "regex": "", "choice": [], "grammar": ""}},
    {"structured_outputs": {}},
    {"ebnf": "", "structural_tag": ""},
]


@pytest.mark.parametrize("fields", NEUTRAL)
def test_nothing_asked_is_no_grammar(fields: dict[str, Any]) -> None:
    service = ScriptedService()
    assert send(service, **fields).status_code == 200
    assert service.generation.grammar is None


TURNED = dict(reversed(SCHEMA.items()))
TWICE: list[tuple[dict[str, Any], GrammarKind, str]] = [
    ({"guided_grammar": LARK, "structured_outputs": {"grammar": LARK}}, GrammarKind.LARK, LARK),
    ({"guided_grammar": LARK, "grammar": LARK}, GrammarKind.LARK, LARK),
    ({"guided_regex": "a+", "regex": "a+"}, GrammarKind.REGEX, "a+"),
    (
        {"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}},
        GrammarKind.LARK,
        LARK,
    ),
    (
        {"response_format": named(SCHEMA), "guided_json": json.dumps(SCHEMA, indent=2)},
        GrammarKind.JSON_SCHEMA,
        SCHEMA_TEXT,
    ),
    (
        {"response_format": named(SCHEMA), "json_schema": TURNED},
        GrammarKind.JSON_SCHEMA,
        SCHEMA_TEXT,
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}},
        GrammarKind.JSON_SCHEMA,
        ANY_OBJECT,
    ),
]


@pytest.mark.parametrize(("fields", "kind", "text"), TWICE)
def test_the_same_form_in_two_fields_is_one(
    fields: dict[str, Any], kind: GrammarKind, text: str
) -> None:
    service = ScriptedService()
    assert send(service, **fields).status_code == 200
    assert service.generation.grammar == Grammar(kind=kind, text=text)


LONG = "x" * (MAX_GRAMMAR_CHARS + 1)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {"schema": SCHEMA}}, "response_format.type", "required"),
    ({"response_format": named(None)}, "response_format.json_schema.schema", "JSON object"),
    ({"response_format": named([1])}, "response_format.json_schema.schema", "JSON object"),
    ({"guided_json": "{"}, "guided_json", "JSON of an object"),
    ({"guided_json": "[1]"}, "guided_json", "JSON object"),
    ({"guided_json": "[" * 50_000}, "guided_json", "JSON of an object"),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json", "whole characters"),
    ({"guided_json": '{"minimum": NaN}'}, "guided_json", "finite"),
    ({"guided_json": {"description": LONG}}, "guided_json", str(MAX_GRAMMAR_CHARS)),
    ({"guided_regex": LONG}, "guided_regex", str(MAX_GRAMMAR_CHARS)),
    ({"guided_regex": 1}, "guided_regex", "string"),
    ({"guided_grammar": LONG}, "guided_grammar", str(MAX_GRAMMAR_CHARS)),
    ({"guided_choice": ["x" * 40_000, "y" * 40_000]}, "guided_choice", str(MAX_GRAMMAR_CHARS)),
    ({"guided_choice": ["a", ""]}, "guided_choice.1", "at least 1"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice", "1024"),
    ({"grammar": 'root ::= "a"'}, "grammar", "Lark"),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "Lark"),
    ({"ebnf": 'root ::= "a"'}, "ebnf", "does not support"),
    ({"structural_tag": "{}"}, "structural_tag", "does not support"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "does not support",
    ),
    (
        {"structured_outputs": {"whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "does not support",
    ),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "one of"),
    ({"guided_json": SCHEMA, "regex": "a"}, "regex", "guided_json"),
    ({"guided_regex": "a", "regex": "b"}, "regex", "guided_regex"),
    (
        {"guided_grammar": LARK, "structured_outputs": {"grammar": 'start: "a"'}},
        "guided_grammar",
        "structured_outputs.grammar",
    ),
    ({"guided_json": {"const": 1}, "json_schema": {"const": True}}, "json_schema", "guided_json"),
    ({"guided_regex": "a", "regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
    ({"guided_regex": '"a"', "guided_json": {"const": "a"}}, "guided_regex", "guided_json"),
    (
        {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
        "guided_choice",
        "response_format",
    ),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "regex"),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED)
def test_what_cannot_be_is_refused_by_field_and_bound(
    fields: dict[str, Any], param: str, says: str
) -> None:
    service = ScriptedService()
    found = error(send(service, **fields), 400)
    assert found["param"] == param
    assert says in found["message"]
    assert len(found["message"]) < 400
    assert not service.answers


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": named({"type": "no"})}, "response_format.json_schema.schema", "no"),
    ({"guided_json": {"uniqueItems": True, "type": "array"}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"$ref": "http://x.invalid/"}}, "guided_json", "x.invalid"),
    ({"guided_regex": "(" + "x" * 500}, "guided_regex", "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_grammar": 'start: "a" | other'}, "guided_grammar", "other"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed"),
]


@pytest.mark.parametrize(("fields", "param", "says"), INVALID)
def test_what_does_not_compile_is_refused_in_the_callers_terms(
    fields: dict[str, Any], param: str, says: str
) -> None:
    service = ScriptedService()
    found = error(send(service, **fields), 400)
    assert found["param"] == param
    assert found["code"] == "invalid_grammar"
    assert says in found["message"]
    assert found["message"].isprintable()
    assert not service.answers


def test_the_fake_engine_follows_no_grammar() -> None:
    service = ScriptedService()
    response = call(service, "POST", CHAT, json={"messages": HI, "regex": "a"})
    assert "fake engine" in error(response, 400)["message"]
    assert not service.answers


def test_a_model_without_an_end_token_needs_stop_tokens() -> None:
    class Endless(FollowingModel):
        @property
        def facts(self) -> ModelFacts:
            return replace(super().facts, eos_token_ids=())

    body = {"messages": HI, "regex": "a"}
    response = call(ScriptedService(), "POST", CHAT, text=Endless(512), json=body)
    assert "stop_token_ids" in error(response, 400)["message"]
    body["stop_token_ids"] = [7]
    response = call(ScriptedService(), "POST", CHAT, text=Endless(512), json=body)
    assert response.status_code == 200
