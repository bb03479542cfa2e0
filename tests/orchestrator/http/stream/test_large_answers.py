"""Responses with many log-probabilities stall no stream, take bounded memory, and read alike."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mlx_dp.orchestrator.api import Ended, Generation, NewTokens, StreamEvent
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.http.preparation.sampling import MAX_LOGPROBS
from mlx_dp.orchestrator.http.stream.whole_response import PORTION_NBYTES
from mlx_dp.orchestrator.http.stream.yield_budget import TURN_UNITS
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.messages.events import FinishReason, TokenLogprob
from tests.support.http.http_calls import CHAT, COMPLETIONS, HI, chat, complete, error, events
from tests.support.http.scripted_service import OPTIONS, ScriptedService, granted

NUM_TOP = 20
NUM_TOKENS = 2000
SPECIAL = 300
"""A token of the fake model that is not shown, so that it waits for text behind it."""

LOGPROB = TokenLogprob(logprob=-0.5, top=tuple((65 + rank, -0.5 - rank) for rank in range(NUM_TOP)))


def service_saying(ids: tuple[int, ...], *, at_once: bool) -> ScriptedService:
    def reply(_: Generation) -> list[StreamEvent]:
        size = len(ids) if at_once else 1
        tokens = [
            NewTokens(ids=ids[at : at + size], logprobs=(LOGPROB,) * size)
            for at in range(0, len(ids), size)
        ]
        return [granted(), *tokens, Ended(reason=FinishReason.LENGTH)]

    service = ScriptedService(reply)
    service.bounds = None
    return service


class CountingText(FakeTextModel):
    """Counts log-probabilities that are written in one run of the event loop."""

    def __init__(self) -> None:
        super().__init__(512)
        self.in_turn = 0
        self.most_in_turn = 0

    def token_bytes(self, token: int) -> bytes:
        if not self.in_turn:
            asyncio.get_running_loop().call_soon(self._turn)
        self.in_turn += 1
        return super().token_bytes(token)

    def _turn(self) -> None:
        self.most_in_turn = max(self.most_in_turn, self.in_turn)
        self.in_turn = 0


def ask(
    service: ScriptedService,
    path: str,
    sent: Callable[[dict[str, Any]], None],
    text: FakeTextModel,
    **body: object,
) -> None:
    """One request whose response goes to ``sent`` message by message."""

    async def run() -> None:
        app = create_app(service, OPTIONS, text)
        requests = asyncio.Queue[dict[str, object]]()
        requests.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})

        async def send(message: dict[str, Any]) -> None:
            sent(message)

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "scheme": "http", "http_version": "1.1",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        }  # fmt: skip
        await app(scope, requests.get, send)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("ids", [(65,) * NUM_TOKENS, (SPECIAL,) * NUM_TOKENS], ids=["text", "none"])
def test_the_event_loop_turns_while_log_probabilities_are_written(
    ids: tuple[int, ...], at_once: bool, stream: bool
) -> None:
    text = CountingText()
    found: list[bytes] = []
    ask(
        service_saying(ids, at_once=at_once),
        CHAT,
        lambda message: found.append(message.get("body", b"")),
        text,
        messages=HI, logprobs=True, top_logprobs=NUM_TOP, n=3, stream=stream,
    )  # fmt: skip
    assert b"".join(found).count(b'"top_logprobs"') == 3 * NUM_TOKENS
    assert text.most_in_turn <= 2 * TURN_UNITS
    assert max(map(len, found)) <= 2 * TURN_UNITS * 100


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_whole_answer_is_sent_in_portions_of_the_announced_size(path: str) -> None:
    messages: list[dict[str, Any]] = []
    asked = (
        {"messages": HI, "logprobs": True, "top_logprobs": NUM_TOP}
        if path == CHAT
        else {"prompt": "a", "logprobs": NUM_TOP}
    )
    service = service_saying((65,) * NUM_TOKENS, at_once=True)
    ask(service, path, messages.append, FakeTextModel(512), **asked)
    start, *bodies = messages
    assert max(len(message["body"]) for message in bodies) < 2 * PORTION_NBYTES
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    body = b"".join(message["body"] for message in bodies)
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    assert len(bodies) > 3
    logprobs = json.loads(body)["choices"][0]["logprobs"]
    assert all(len(items) == NUM_TOKENS for items in logprobs.values())


def test_a_whole_answer_takes_little_more_than_its_body() -> None:
    nbytes = 0

    def count(message: dict[str, Any]) -> None:
        nonlocal nbytes
        nbytes += len(message.get("body", b""))

    service = service_saying((65,) * NUM_TOKENS, at_once=True)
    tracemalloc.start()
    try:
        ask(
            service, CHAT, count, FakeTextModel(512),
            messages=HI, logprobs=True, top_logprobs=NUM_TOP, n=2,
        )  # fmt: skip
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Some megabytes are one slice's values, the application, and the tokens themselves.
    assert peak_nbytes < 1.5 * nbytes + 8 * 2**20, (peak_nbytes, nbytes)


@pytest.mark.parametrize("at_once", [False, True])
def test_whole_answers_are_what_encoding_them_in_one_piece_gives(at_once: bool) -> None:
    service = service_saying((*'é"x'.encode(), SPECIAL), at_once=at_once)
    answers = [
        chat(service, n=2, logprobs=True, top_logprobs=2),
        chat(service, n=2, logprobs=True),
        chat(service),
        complete(service, prompt=["a", "b"], n=2, logprobs=2),
        complete(service, prompt=["a", "b"], n=2, echo=True),
        complete(service),
    ]
    for answer in answers:
        assert answer.content == msgspec.json.encode(answer.json())
        assert answer.headers["content-length"] == str(len(answer.content))
        assert answer.headers["content-type"] == "application/json"


def test_an_answer_without_tokens_has_lists_without_items() -> None:
    service = service_saying((), at_once=False)
    assert chat(service, logprobs=True).json()["choices"][0]["logprobs"] == {"content": []}
    assert complete(service, logprobs=1).json()["choices"][0]["logprobs"] == {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }


def test_a_slow_reader_gets_its_text_in_portions_that_join() -> None:
    service = ScriptedService(
        lambda _: [granted(), NewTokens(ids=(65,) * 5000), Ended(reason=FinishReason.LENGTH)]
    )
    chunks = events(chat(service, stream=True))
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "A" * 5000
    assert max(map(len, texts)) < 5000


MANY = MAX_LOGPROBS // (4 * 21)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_more_log_probabilities_than_allowed_are_refused_with_the_bound(
    name: str, stream: bool
) -> None:
    service = service_saying((), at_once=False)
    asked = {"n": 4, "logprobs": True, "top_logprobs": 20, "stream": stream}
    found = error(chat(service, **asked, **{name: MANY + 1}), 400)
    assert found["param"] == name
    assert str(MAX_LOGPROBS) in found["message"]
    assert f": {MANY} tokens fit" in found["message"]
    assert not service.answers
    assert chat(service, **asked, **{name: MANY}).status_code == 200
    assert chat(service, n=4, **{name: 10 * MANY}).status_code == 200


def test_all_answers_to_all_prompts_count() -> None:
    service = service_saying((), at_once=False)
    asked = {"prompt": ["a", "b"], "n": 2, "logprobs": 20}
    assert error(complete(service, **asked, max_tokens=MANY + 1), 400)["param"] == "max_tokens"
    assert complete(service, **asked, max_tokens=MANY).status_code == 200


@pytest.mark.parametrize(
    ("context_length", "max_tokens"), [(MANY, None), (2 * MANY, MANY)], ids=["short", "long"]
)
def test_an_answer_without_a_bound_of_its_own_gets_one_if_it_could_break_it(
    context_length: int, max_tokens: int | None
) -> None:
    service = service_saying((), at_once=False)
    service.bounds = AdmissionLimits(context_length=context_length, pool_tokens=None)
    service.current = replace(service.current, max_queued_requests=16)
    assert chat(service, n=4, logprobs=True, top_logprobs=20).status_code == 200
    assert {answer.generation.max_tokens for answer in service.answers} == {max_tokens}
    service.answers.clear()
    assert chat(service).status_code == 200
    assert service.generation.max_tokens is None
