"""Large bodies stall no other request, take bounded memory, and mean the same as small ones."""

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.openai.chat_request import ChatRequest
from mlx_dp.orchestrator.formats.openai.completion_request import CompletionRequest
from mlx_dp.orchestrator.http.body.body_parser import (
    INLINE_SIGNS,
    INLINE_TEXT_NBYTES,
    MAX_SIGNS,
    BodyParser,
)
from mlx_dp.orchestrator.http.body.limits import FREE_NBYTES, MemoryLimit
from mlx_dp.orchestrator.http.body.packed_body import (
    MAX_OTHER_VALUES,
    PackedBody,
    Refusal,
    pack,
    unpack,
)
from tests.support.http.http_calls import CHAT, COMPLETIONS, call, error
from tests.support.http.scripted_service import OPTIONS, ScriptedService

MANY = 10 * INLINE_SIGNS
JSON_TYPE = {"content-type": "application/json"}


def completion(body: dict[str, Any]) -> CompletionRequest:
    packed = pack(CompletionRequest, json.dumps(body).encode())
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=PackedBody | Refusal)
    assert isinstance(sent, PackedBody)
    return unpack(CompletionRequest, sent)


@given(
    st.one_of(
        st.text(),
        st.lists(st.integers(0, 2**31 - 1), min_size=1),
        st.lists(st.text() | st.lists(st.integers(0, 2**31 - 1)), min_size=1, max_size=128),
    )
)
def test_a_packed_prompt_is_the_same(prompt: object) -> None:
    body = {"prompt": prompt, "temperature": 0.5, "stop": ["a", "é"], "logit_bias": {"1": 2}}
    plain = CompletionRequest.model_validate_json(json.dumps(body))
    assert (
        completion({**body, "unknown": [1, {"a": None}]}).model_dump(exclude={"unknown"})
        == plain.model_dump()
    )


def test_a_packed_chat_is_the_same() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "é\u2028"}] * 3, "n": 2}).encode()
    packed = pack(ChatRequest, body)
    assert isinstance(packed, PackedBody)
    assert unpack(ChatRequest, packed) == ChatRequest.model_validate_json(body)


def test_a_refusal_is_the_same() -> None:
    refused = pack(CompletionRequest, b'{"prompt": [1, -1], "n": 1}')
    assert isinstance(refused, Refusal)
    small = error(
        call(ScriptedService(), "POST", COMPLETIONS, json={"prompt": [1, -1], "n": 1}), 400
    )
    assert refused == Refusal(status=400, message=small["message"], param="prompt", code=None)


def test_values_beside_the_token_ids_are_bounded() -> None:
    body = {"prompt": [1] * MANY, "unknown": [[]] * (MAX_OTHER_VALUES + 1)}
    refused = pack(CompletionRequest, json.dumps(body).encode())
    assert isinstance(refused, Refusal)
    assert str(MAX_OTHER_VALUES) in refused.message
    assert completion({"prompt": [1] * MANY}).prompt == ((1,) * MANY,)


@pytest.mark.system
def test_many_token_ids_are_parsed_in_a_process_of_their_own() -> None:
    service = ScriptedService()
    service.bounds = None
    response = call(service, "POST", COMPLETIONS, json={"prompt": [65] * MANY, "max_tokens": 3})
    assert response.status_code == 200, response.text
    assert service.generation.prompt_ids == (65,) * MANY
    assert service.generation.max_tokens == 3


@pytest.mark.system
def test_what_is_wrong_with_a_large_body_is_said_as_with_a_small_one() -> None:
    service = ScriptedService()
    response = call(service, "POST", COMPLETIONS, json={"prompt": [65] * MANY + [-1]})
    assert error(response, 400)["param"] == "prompt"
    response = call(service, "POST", CHAT, json={"messages": [{"role": "user"}] * MANY})
    assert error(response, 400)["param"] == "messages"


def test_more_values_than_any_request_needs_are_refused_unparsed() -> None:
    content = b'{"prompt":[' + b"1," * MAX_SIGNS + b"1]}"
    response = call(ScriptedService(), "POST", COMPLETIONS, content=content, headers=JSON_TYPE)
    assert str(MAX_SIGNS) in error(response, 413)["message"]


@pytest.mark.system
def test_the_event_loop_turns_while_a_body_is_parsed() -> None:
    # A child that takes its time, so that the test sees the loop turn in it.
    code = "import sys, time; sys.stdin.buffer.read(); time.sleep(0.3); sys.exit(3)"

    async def run() -> int:
        parser = BodyParser((sys.executable, "-c", code))
        body = json.dumps({"prompt": [1] * MANY}).encode()
        parsing = asyncio.create_task(parser.parse(CompletionRequest, body))
        turns = 0
        while not parsing.done():
            await asyncio.sleep(0.001)
            turns += 1
        with pytest.raises(RuntimeError, match="ended with status 3"):
            await parsing
        return turns

    assert asyncio.run(run()) > 50


@pytest.mark.parametrize("here", [True, False])
def test_text_is_parsed_here_unless_it_is_very_long(here: bool) -> None:
    text = "x" * (INLINE_TEXT_NBYTES - 100 if here else INLINE_TEXT_NBYTES)

    async def run() -> None:
        parser = BodyParser(("/nowhere",))
        parsing = parser.parse(CompletionRequest, json.dumps({"prompt": text}).encode())
        if here:
            assert (await parsing).prompt == (text,)
        else:
            with pytest.raises(FileNotFoundError):
                await parsing

    asyncio.run(run())


def test_bodies_share_their_room_and_give_it_back() -> None:
    limit = MemoryLimit(1000)
    with limit.reserve() as first, limit.reserve() as second:
        first(FREE_NBYTES)
        first(600)
        second(FREE_NBYTES + 400)
        assert limit.held_nbytes == 1000
        with pytest.raises(ApiError) as caught:
            second(1)
        assert caught.value.status == 429
        assert caught.value.headers.keys() == {"retry-after", "connection"}
        with limit.reserve() as small:
            small(FREE_NBYTES)
    assert limit.held_nbytes == 0


def test_large_bodies_shut_out_no_small_ones() -> None:
    options = replace(OPTIONS, max_bodies_nbytes=1000)
    service = ScriptedService()
    large = call(service, "POST", COMPLETIONS, options=options, json={"prompt": "x" * 2**17})
    assert error(large, 429)["code"] == "queue_full"
    assert call(service, "POST", COMPLETIONS, options=options, json={"prompt": "x"}).is_success
