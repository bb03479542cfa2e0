"""POST /v1/completions: prompts in every shape, echo, and log-probabilities in the older shape."""

import asyncio

import pytest

from mlx_dp.orchestrator.api import Ended, NewTokens, Started
from mlx_dp.orchestrator.http.preparation.prompt_views import INLINE_TOKENS
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.proto.messages.events import FinishReason, TokenLogprob
from tests.support.http.http_calls import COMPLETIONS, call, complete, error, events
from tests.support.http.scripted_service import ScriptedService, granted, says


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [b"hi"]),
        ([104, 105], [b"hi"]),
        (["hi", "yo"], [b"hi", b"yo"]),
        ([[104, 105], [121]], [b"hi", b"y"]),
        (["hi", [121]], [b"hi", b"y"]),
    ],
)
def test_prompts_may_be_text_or_ids_one_or_many(prompt: object, ids: list[bytes]) -> None:
    service = ScriptedService()
    response = complete(service, prompt=prompt)
    assert [bytes(a.generation.prompt_ids) for a in service.answers] == ids
    assert [c["index"] for c in response.json()["choices"]] == list(range(len(ids)))
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert response.json()["object"] == "text_completion"


def test_choices_of_a_batch_stand_behind_their_prompt() -> None:
    service = ScriptedService()
    service.reply = lambda g: says(bytes(g.prompt_ids).decode() + str(g.params.seed))
    response = complete(service, prompt=["a", "b"], n=2, seed=5, echo=True)
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert texts == ["aa5", "aa6", "bb5", "bb6"]
    assert response.json()["usage"]["prompt_tokens"] == 2


def test_echo_comes_first_in_a_stream() -> None:
    chunks = events(complete(ScriptedService(lambda _: says("!")), echo=True, stream=True))
    assert [c["choices"][0]["text"] for c in chunks] == ["hi", "!", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("num_tokens", [3, 3 * INLINE_TOKENS])
def test_special_tokens_are_shown_on_request(num_tokens: int) -> None:
    told = [granted(), NewTokens(ids=(300,)), Ended(reason=FinishReason.STOP)]
    service = ScriptedService(lambda _: told)
    service.bounds = None
    body = {"prompt": [97, 300, *[98] * (num_tokens - 2)], "echo": True}
    for skip in (None, True, False):
        response = complete(service, **body, skip_special_tokens=skip)
        name = "<|300|>" if skip is False else ""
        assert response.json()["choices"][0]["text"] == f"a{name}{'b' * (num_tokens - 2)}{name}"


class Decoding(FakeTextModel):
    """Counts the ids that are decoded in one run of the event loop."""

    def __init__(self) -> None:
        super().__init__(512)
        self.in_turn = 0
        self.most_in_turn = 0

    def _shown_bytes(self, token: int) -> bytes:
        if not self.in_turn:
            asyncio.get_running_loop().call_soon(self._turn)
        self.in_turn += 1
        self.most_in_turn = max(self.most_in_turn, self.in_turn)
        return super()._shown_bytes(token)

    def _turn(self) -> None:
        self.in_turn = 0


@pytest.mark.parametrize("num_tokens", [100, 3 * INLINE_TOKENS])
def test_a_long_prompt_is_echoed_in_portions(num_tokens: int) -> None:
    service = ScriptedService(lambda _: says("!"))
    service.bounds = None
    text = Decoding()
    ids = list("é".encode()) * (num_tokens // 2)
    body = {"prompt": ids, "echo": True, "n": 2}
    response = call(service, "POST", COMPLETIONS, text=text, json=body)
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert texts == ["é" * (num_tokens // 2) + "!"] * 2
    assert text.most_in_turn < INLINE_TOKENS


def test_a_prompt_over_the_context_is_refused_before_it_is_echoed() -> None:
    service = ScriptedService()
    text = Decoding()
    body = {"prompt": [65] * 1000, "echo": True}
    found = error(call(service, "POST", COMPLETIONS, text=text, json=body), 400)
    assert found["code"] == "context_length_exceeded"
    assert found["param"] == "prompt"
    assert "resulted in 1000 tokens" in found["message"]
    assert not text.most_in_turn


def test_logprobs_have_the_older_shape() -> None:
    tokens = [
        NewTokens(ids=(97,), logprobs=(TokenLogprob(logprob=-2.0, top=((98, -0.1),)),)),
        NewTokens(ids=(256,), logprobs=(TokenLogprob(logprob=-0.2, top=((256, -0.2),)),)),
    ]
    script = [granted(), *tokens, Ended(reason=FinishReason.STOP)]
    body = complete(ScriptedService(lambda _: script), logprobs=1).json()
    assert body["choices"][0]["text"] == "a"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "<|end|>"],
        "token_logprobs": [-2.0, -0.2],
        "top_logprobs": [{"b": -0.1, "a": -2.0}, {"<|end|>": -0.2}],
        "text_offset": [0, 1],
    }


def test_cached_tokens_are_reported() -> None:
    script = [granted(), Started(cached_tokens=1), granted(1), *says("x")[2:]]
    body = complete(ScriptedService(lambda _: script)).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize(("sent", "salt"), [({"cache_salt": "tenant"}, "tenant"), ({}, "")])
def test_the_salt_of_cached_prefixes_reaches_the_service(sent: dict[str, str], salt: str) -> None:
    service = ScriptedService()
    assert complete(service, **sent).status_code == 200
    assert service.generation.cache_salt == salt


@pytest.mark.parametrize(
    "prompt",
    [
        "", [], [[]], [""], None, 1, {}, [True, False], [1.5], ["a", 1], [1, True], [[1, [2]]],
        [-1], [2**31], [2**63], [10**30], [[1], None], [512],
    ],
)  # fmt: skip
def test_bad_prompts_are_refused_by_name(prompt: object) -> None:
    service = ScriptedService()
    assert error(complete(service, prompt=prompt), 400)["param"] == "prompt"
    assert not service.answers


def test_too_many_answers_at_once_are_refused_with_the_bound() -> None:
    found = error(complete(ScriptedService(), prompt=["a"] * 65, n=2), 400)
    assert "130" in found["message"]
    assert "128" in found["message"]


def test_echo_with_logprobs_is_refused() -> None:
    assert error(complete(ScriptedService(), echo=True, logprobs=0), 400)["param"] == "echo"


def test_the_event_loop_turns_between_prompts() -> None:
    order: list[str] = []

    class Text(FakeTextModel):
        def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
            order.append(text)
            asyncio.get_running_loop().call_soon(order.append, "turn")
            return super().encode(text, add_special_tokens=add_special_tokens)

    body = {"prompt": ["a", "b"]}
    call(ScriptedService(), "POST", COMPLETIONS, text=Text(512), json=body)
    assert order == ["a", "turn", "b", "turn"]
