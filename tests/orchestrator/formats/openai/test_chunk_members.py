"""Token ids and continuous usage, in the shapes of vLLM."""

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from mlx_dp.orchestrator.api import Ended, NewTokens
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.proto.messages.events import FinishReason, TokenLogprob
from tests.support.http.http_calls import HI, call, chat, complete, events
from tests.support.http.scripted_service import ScriptedService, granted, says
from tests.support.http.served_app import served

Send = Callable[..., Any]
BOTH = (chat, complete)
PROMPTS = {chat: list(b"user: hi\nassistant: "), complete: list(b"hi")}
# Characters of several tokens, and special tokens without any text.
ANSWER = [*"é😀".encode(), 300, *b"ab", 300]
EOS = 256


def tokens(*ids: int, reason: FinishReason = FinishReason.STOP) -> Callable[[object], list[Any]]:
    return lambda _: [granted(), *(NewTokens(ids=(i,)) for i in ids), Ended(reason=reason)]


def streamed(send: Send, reply: Callable[[object], list[Any]], **fields: Any) -> list[Any]:
    return events(send(ScriptedService(reply), stream=True, **fields))


def prompt_of(send: Send, body: Any) -> object:
    """Chats have it beside their choices, completions inside each."""
    return body["prompt_token_ids"] if send is chat else body["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize("send", BOTH)
def test_a_whole_answer_has_all_its_ids(send: Send) -> None:
    service = ScriptedService(tokens(*ANSWER, EOS))
    body = send(service, return_token_ids=True).json()
    assert prompt_of(send, body) == PROMPTS[send]
    # The end token is one of them: ids are as many as the usage counts.
    assert body["choices"][0]["token_ids"] == [*ANSWER, EOS]
    assert body["usage"]["completion_tokens"] == len(ANSWER) + 1


@pytest.mark.parametrize("send", BOTH)
def test_nothing_of_it_is_there_unasked(send: Send) -> None:
    response = send(ScriptedService(tokens(*ANSWER, EOS)))
    assert "token_ids" not in response.text
    response = send(ScriptedService(tokens(*ANSWER, EOS)), stream=True)
    assert "token_ids" not in response.text
    assert "usage" not in response.text


@pytest.mark.parametrize("send", BOTH)
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_has_the_prompt_once_and_each_id_once(send: Send, logprobs: bool) -> None:
    def reply(_: object) -> list[Any]:
        entry = (TokenLogprob(logprob=-0.5),) if logprobs else ()
        each = [NewTokens(ids=(i,), logprobs=entry) for i in (*ANSWER, EOS)]
        return [granted(), *each, Ended(reason=FinishReason.STOP)]

    asked = {} if not logprobs else {"logprobs": True if send is chat else 0}
    first, *others = streamed(send, reply, return_token_ids=True, **asked)
    assert prompt_of(send, first) == PROMPTS[send]
    assert first["choices"][0]["token_ids"] == []
    assert not any("prompt_token_ids" in str(event) for event in others)
    found = [event["choices"][0]["token_ids"] for event in others]
    assert list(chain.from_iterable(found)) == [*ANSWER, EOS]
    # Each comes when it is drawn, with or without text to show.
    assert [len(ids) for ids in found[:-1]].count(1) == len(ANSWER) + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send", BOTH)
def test_ids_end_with_the_one_that_completes_a_stop_string(send: Send, stream: bool) -> None:
    service = ScriptedService(lambda _: [granted(), NewTokens(ids=tuple(b"one two three"))])
    response = send(service, stop=[" two"], return_token_ids=True, stream=stream)
    if stream:
        found = [event["choices"][0]["token_ids"] for event in events(response)]
        assert list(chain.from_iterable(found)) == list(b"one two")
    else:
        assert response.json()["choices"][0]["token_ids"] == list(b"one two")
        assert response.json()["usage"]["completion_tokens"] == len(b"one two")


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_and_prompt_has_its_own_ids(stream: bool) -> None:
    service = ScriptedService()
    service.reply = lambda _: tokens(97 + len(service.answers), EOS)(None)
    response = complete(
        service, prompt=[[1, 2], [3]], n=2, return_token_ids=True, stream=stream, echo=True
    )
    if stream:
        choices = [event["choices"][0] for event in events(response)]
        prompts = {c["index"]: c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c}
        ids: dict[int, list[int]] = {}
        for choice in choices:
            ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    else:
        choices = response.json()["choices"]
        prompts = {c["index"]: c["prompt_token_ids"] for c in choices}
        ids = {c["index"]: c["token_ids"] for c in choices}
    assert prompts == {0: [1, 2], 1: [1, 2], 2: [3], 3: [3]}
    assert ids == {index: [97 + index, EOS] for index in range(4)}


def usages(found: list[Any]) -> list[tuple[int, int, int]]:
    assert all(event["usage"].keys() >= {"prompt_tokens"} for event in found), found
    return [
        (u["prompt_tokens"], u["completion_tokens"], u["total_tokens"])
        for u in (event["usage"] for event in found)
    ]


@pytest.mark.parametrize("include", [False, True, None])
@pytest.mark.parametrize("send", BOTH)
def test_continuous_usage_is_in_every_chunk(send: Send, include: bool | None) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include}
    reply = tokens(*b"abc", 300, EOS)
    found = streamed(send, reply, stream_options=options)
    prompt = len(PROMPTS[send])
    if include:
        *found, last = found
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 5
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    counts = usages(found)
    # A chat opens with its role, before any token.
    opening = [0] if send is chat else []
    assert [completion for _, completion, _ in counts] == [*opening, 1, 2, 3, 5]
    assert all(p == prompt and total == p + c for p, c, total in counts)


def test_continuous_usage_counts_each_choice_by_itself() -> None:
    service = ScriptedService()
    service.reply = lambda _: tokens(*b"abcd"[: len(service.answers) + 1], EOS)(None)
    options = {"continuous_usage_stats": True}
    response = complete(service, prompt=["x", "yyy"], n=2, stream=True, stream_options=options)
    last = {event["choices"][0]["index"]: event["usage"] for event in events(response)}
    counts = {at: (u["prompt_tokens"], u["completion_tokens"]) for at, u in last.items()}
    assert counts == {0: (1, 2), 1: (1, 3), 2: (3, 4), 3: (3, 5)}


@pytest.mark.parametrize("send", BOTH)
def test_usage_in_each_chunk_is_null_where_only_the_last_has_it(send: Send) -> None:
    *found, last = streamed(
        send, tokens(97, EOS),
        stream_options={"include_usage": True, "continuous_usage_stats": False},
    )  # fmt: skip
    assert all(event["usage"] is None for event in found)
    assert last["usage"]["completion_tokens"] == 2


def test_a_long_prompt_has_all_its_ids() -> None:
    service = ScriptedService(tokens(97, EOS))
    service.bounds = None
    prompt = [number % 300 for number in range(20_000)]
    body = call(
        service, "POST", "/v1/completions", json={"prompt": prompt, "return_token_ids": True}
    ).json()
    assert body["choices"][0]["prompt_token_ids"] == prompt


@pytest.mark.system
def test_the_openai_package_reads_both() -> None:
    # Imported late: it takes a second, which no collection should wait for.
    import openai

    async def run() -> None:
        service = ScriptedService(lambda _: says("Hé"))
        options = HttpOptions(served_model_name="demo")
        extra = {"return_token_ids": True}
        async with asyncio.timeout(60), served(service, options) as port:
            api = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x")
            answer = await api.chat.completions.create(model="demo", messages=HI, extra_body=extra)
            assert answer.prompt_token_ids == PROMPTS[chat]
            assert answer.choices[0].token_ids == [*"Hé".encode(), EOS]
            stream = await api.chat.completions.create(
                model="demo",
                messages=HI,
                stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
                extra_body=extra,
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].prompt_token_ids == PROMPTS[chat]
            ids = [token for c in chunks if c.choices for token in c.choices[0].token_ids]
            assert ids == [*"Hé".encode(), EOS]
            assert [chunk.usage.completion_tokens for chunk in chunks] == [0, 1, 2, 3, 4, 4, 4]
            again = [*HI, answer.choices[0].message.to_dict(), *HI]
            await api.chat.completions.create(model="demo", messages=again, max_tokens=-1)
            await api.close()

    asyncio.run(run())
