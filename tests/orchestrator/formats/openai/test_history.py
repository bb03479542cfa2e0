"""Chat histories as clients keep them: any earlier response is accepted in a later request."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.http.http_calls import CHAT, HI, call, error
from tests.support.http.recording_model import RecordingModel
from tests.support.http.scripted_service import ScriptedService

USER = {"role": "user", "content": "and then?"}


def rendered(messages: Sequence[object], **fields: Any) -> list[Mapping[str, object]]:
    """The template's input for these messages."""
    text = RecordingModel()
    response = call(
        ScriptedService(), "POST", CHAT, text=text, json={"messages": messages, **fields}
    )
    assert response.status_code == 200, response.text
    return list(text.chats[0].messages)


def assistant(**members: Any) -> Mapping[str, object]:
    """The template's input for an earlier response."""
    _, found, _ = rendered([*HI, {"role": "assistant", **members}, USER])
    return found


def said(text: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


def thought(text: str, reasoning: str) -> dict[str, object]:
    return said(text, reasoning_content=reasoning)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"content": None}, said("")),
        ({}, said("")),
        ({"content": []}, said("")),
        ({"content": ""}, said("")),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, said("ab")),
        ({"content": ["a", {"type": "text", "text": "b"}]}, said("ab")),
        ({"content": [{"type": "output_text", "text": "a", "annotations": []}]}, said("a")),
        ({"content": [{"type": "input_text", "text": "a"}]}, said("a")),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, said("no")),
        ({"content": None, "refusal": "no"}, said("no")),
        ({"content": "yes", "refusal": None}, said("yes")),
        ({"content": None, "audio": {"id": "a", "transcript": "spoken"}}, said("spoken")),
        (
            {
                "content": "a", "refusal": None, "annotations": [], "audio": None,
                "function_call": None, "tool_calls": None, "reasoning_content": None,
                "reasoning": None, "reasoning_details": [{"type": "x"}], "name": None,
                "prefix": False, "partial": False, "provider_specific_fields": {"a": 1},
                "thinking_blocks": None, "images": [], "id": "msg_1", "unheard_of": {"deep": [1]},
            },
            said("a"),
        ),
        ({"content": "a", "tool_calls": []}, said("a")),
        ({"content": "a", "prefix": True}, said("a")),
        ({"content": "a", "name": "bot"}, said("a", name="bot")),
        ({"content": "a", "reasoning_content": "r"}, thought("a", "r")),
        ({"content": "a", "reasoning": "r"}, said("a", reasoning="r")),
        ({"content": "a", "reasoning": {"effort": "high"}}, said("a")),
        (
            {"content": [{"type": "thinking", "thinking": "r", "signature": "s"},
                         {"type": "text", "text": "a"}]},
            thought("a", "r"),
        ),
        (
            {"content": [{"type": "reasoning", "text": "r"}, {"type": "text", "text": "a"}]},
            thought("a", "r"),
        ),
        (
            {"content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
                         {"type": "output_text", "text": "a"}]},
            thought("a", "r"),
        ),
        (
            {"content": [{"type": "reasoning", "summary": [], "encrypted_content": "x"},
                         {"type": "redacted_thinking", "data": "x"},
                         {"type": "text", "text": "a"}]},
            said("a"),
        ),
    ],
)  # fmt: skip
def test_whatever_an_answer_holds_may_come_back(
    members: dict[str, object], expected: dict[str, object]
) -> None:
    assert assistant(**members) == expected


CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
SEEN_CALL = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_earlier_calls_and_their_results_reach_the_template(content: dict[str, object]) -> None:
    messages = [
        *HI,
        {"role": "assistant", **content, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "It is 2."},
        USER,
    ]
    _, calls, result, *_ = rendered(messages)
    assert calls == said("", tool_calls=[SEEN_CALL])
    assert result == {"role": "tool", "content": "2", "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_objects_where_they_can_be(arguments: object, seen: object) -> None:
    [call_seen] = assistant(
        tool_calls=[
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        ]
    )["tool_calls"]  # type: ignore[misc]
    assert call_seen["function"]["arguments"] == seen


def test_older_and_other_calls_are_calls_too() -> None:
    legacy = {"name": "add", "arguments": '{"a": 1}'}
    assert assistant(function_call=legacy) == said(
        "", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    )
    custom = {"id": "c", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}
    [seen] = assistant(tool_calls=[custom])["tool_calls"]  # type: ignore[misc]
    assert seen["function"] == {"name": "sql", "arguments": {"input": "select 1"}}
    result = {"role": "function", "name": "add", "content": "2"}
    assert rendered([*HI, {"role": "assistant", "function_call": legacy}, result])[2] == {
        "role": "tool", "name": "add", "content": "2",
    }  # fmt: skip


def test_an_answer_of_our_own_can_be_sent_back_as_it_is() -> None:
    answer = call(ScriptedService(), "POST", CHAT, json={"messages": HI}).json()
    message = answer["choices"][0]["message"]
    assert rendered([*HI, message, USER])[1] == message


@pytest.mark.parametrize("choice", ["tools", "functions"])
def test_tools_that_may_not_be_called_are_taken_and_not_shown(choice: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    chosen = {"tools": "tool_choice", "functions": "function_call"}[choice]
    assert rendered(HI, **{choice: tools, chosen: "none"}) == HI
    for other in (None, "auto", "required"):
        body = {"messages": HI, choice: tools, chosen: other}
        assert error(call(ScriptedService(), "POST", CHAT, json=body), 400)["param"] == choice


@pytest.mark.parametrize(
    ("message", "member"),
    [
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "system", "content": None}, "content"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "content"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content"),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}, "content"),
        ({"role": "assistant", "content": [{"type": ["text"]}]}, "content"),
        ({"role": "assistant", "content": [{"type": "text", "text": None}]}, "content"),
        ({"role": "assistant", "content": [None]}, "content"),
        ({"role": "assistant", "content": [{"type": "text", "text": "x"}] * 1025}, "content"),
        ({"role": "assistant", "content": {"type": "text", "text": "x"}}, "content"),
        ({"role": "assistant", "audio": {"id": "a"}}, "audio"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": {"id": "x"}}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL] * 1025}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": {}}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "x" * 257}}]},
         "tool_calls"),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "function_call"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
    ],
)  # fmt: skip
def test_what_no_template_can_say_is_refused_by_its_place(
    message: dict[str, object], member: str
) -> None:
    body = {"messages": [*HI, message, USER]}
    found = error(call(ScriptedService(), "POST", CHAT, json=body), 400)
    assert found["param"] == f"messages.1.{member}"
    assert len(found["message"]) < 400


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_last_message_that_is_to_be_continued_is_refused(name: str) -> None:
    body = {"messages": [*HI, {"role": "assistant", "content": "x", name: True}]}
    found = error(call(ScriptedService(), "POST", CHAT, json=body), 400)
    assert found["param"] == f"messages.1.{name}"
    assert found["code"] == "unsupported_parameter"


def test_a_large_history_of_calls_is_taken_beside_the_event_loop_too() -> None:
    arguments = json.dumps({"a": list(range(1000))})
    calls = [{**CALL, "function": {"name": "add", "arguments": arguments}}] * 100
    [seen] = rendered([{"role": "assistant", "tool_calls": calls}])
    assert len(seen["tool_calls"]) == 100  # type: ignore[arg-type]
