"""Requests that are too long get one wording and one code; responses end at the limit."""

import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.fields import MAX_REQUEST_TOKENS
from mlx_dp.proto.messages.events import FinishReason
from tests.support.http.http_calls import CHAT, COMPLETIONS, call, chat, complete, error
from tests.support.http.scripted_service import OPTIONS, ScriptedService, says

POOL = AdmissionLimits(context_length=512, pool_tokens=99)
CONTEXT = AdmissionLimits(context_length=100, pool_tokens=None)
WORDING = re.compile(r"^This model's maximum context length is (\d+) tokens\. However, ")


class Measuring(FakeTextModel):
    """Records the lengths of tokenized texts."""

    longest = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        self.longest = max(self.longest, len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)


def service_of(limits: AdmissionLimits | None, *, strict: bool = False) -> ScriptedService:
    service = ScriptedService(lambda _: says("xyz", FinishReason.LENGTH))
    service.bounds = limits
    service.strict_max_tokens = strict
    return service


def ask(service: ScriptedService, path: str, num_chars: int, **body: Any) -> httpx.Response:
    text = "x" * num_chars
    if path == CHAT:
        return chat(service, messages=[{"role": "user", "content": text}], **body)
    return complete(service, prompt=text, **body)


def refused(response: httpx.Response) -> dict[str, Any]:
    """The error, in the form by which clients recognise an overflow."""
    found = error(response, 400)
    assert found["code"] == "context_length_exceeded"
    assert found["type"] == "invalid_request_error"
    said = WORDING.match(found["message"])
    assert said is not None, found["message"]
    assert said[1] == "100"
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("limits", [POOL, CONTEXT], ids=["pool", "context"])
@pytest.mark.parametrize("num_chars", [100, 101, 500, 2_000, 1_000_000])
@pytest.mark.parametrize("max_tokens", [None, 1, 5, 10**6])
def test_a_prompt_that_does_not_fit_is_refused_in_one_wording(
    path: str, limits: AdmissionLimits, num_chars: int, max_tokens: int | None
) -> None:
    service = service_of(limits)
    found = refused(ask(service, path, num_chars, max_tokens=max_tokens))
    assert found["param"] == ("messages" if path == CHAT else "prompt")
    assert "your messages resulted in" in found["message"]
    assert not service.answers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_that_is_far_too_long_is_not_tokenized_as_a_whole(path: str) -> None:
    prompt = "x" * 1_000_000
    body = {"prompt": prompt, "messages": [{"role": "user", "content": prompt}]}
    del body["messages" if path == COMPLETIONS else "prompt"]
    text = Measuring(512)
    found = refused(call(service_of(CONTEXT), "POST", path, text=text, json=body))
    assert "tokens or more (1000" in found["message"]
    assert text.longest < 2000


@pytest.mark.parametrize("num_ids", [100, MAX_REQUEST_TOKENS + 1])
@pytest.mark.parametrize("others", [0, 1])
def test_token_ids_that_do_not_fit_are_refused_alike_however_many(
    num_ids: int, others: int
) -> None:
    service = service_of(CONTEXT)
    ids = [1] * num_ids
    found = refused(complete(service, prompt=[ids, *[[1]] * others] if others else ids))
    assert f"your messages resulted in {num_ids} tokens" in found["message"]
    assert not service.answers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("limits", [POOL, CONTEXT], ids=["pool", "context"])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("asked", [91, 4096, 2**31 - 1, 2**63 - 1])
@pytest.mark.parametrize("stream", [False, True])
def test_more_than_is_left_is_no_reason_to_refuse(
    path: str, limits: AdmissionLimits, name: str, asked: int, stream: bool
) -> None:
    service = service_of(limits)
    response = ask(service, path, 10, n=3, stream=stream, **{name: asked})
    assert response.status_code == 200, response.text
    assert [answer.generation.max_tokens for answer in service.answers] == [asked] * 3
    if not stream:
        assert [c["finish_reason"] for c in response.json()["choices"]] == ["length"] * 3
        assert response.json()["usage"]["completion_tokens"] == 9


def test_a_million_tokens_with_log_probabilities_are_cut_before_they_are_counted() -> None:
    service = service_of(POOL)
    assert chat(service, max_tokens=10**6, logprobs=True, top_logprobs=20).is_success


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limits", [POOL, CONTEXT], ids=["pool", "context"])
def test_a_strict_service_refuses_it_by_the_name_that_the_client_used(
    name: str, limits: AdmissionLimits
) -> None:
    service = service_of(limits, strict=True)
    found = refused(ask(service, COMPLETIONS, 10, **{name: 91}))
    assert found["param"] == name
    assert "you requested 101 tokens (10 in the messages, 91 in the completion)" in found["message"]
    assert ask(service, COMPLETIONS, 10, **{name: 90}).is_success


@pytest.mark.parametrize(
    ("limits", "flag", "most"),
    [(POOL, None, 100), (CONTEXT, None, 100), (None, None, 512), (None, 64, 64)],
    ids=["pool", "context", "not ready", "not ready, with the flag"],
)
def test_models_say_how_long_a_request_can_be(
    limits: AdmissionLimits | None, flag: int | None, most: int
) -> None:
    service = service_of(limits)
    options = replace(OPTIONS, context_length=flag)
    text = FakeTextModel(512, 512)
    for path in ("/v1/models", "/v1/models/demo/fake"):
        body = call(service, "GET", path, options=options, text=text).json()
        card = body["data"][0] if "data" in body else body
        assert card["max_model_len"] == most
    if limits is not None:
        assert ask(service, COMPLETIONS, most - 1).is_success
        refused(ask(service, COMPLETIONS, most))
