"""The whole service, as processes, called by the openai package, browsers and containers."""

import http.client
import json
from collections.abc import Iterator

import pytest

from tests.support.hosts.served import Served

pytestmark = pytest.mark.system

PAGE = "http://localhost:3000"
KEY = "sk-key"
POOL_TOKENS = 99
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def service() -> Iterator[Served]:
    arguments = ("--engine", "fake", "--dp-size", "2", "--fake-pool-tokens", str(POOL_TOKENS))
    names = ("--served-model-name", "chat", "org/name", "--cors-origin", "http://LOCALHOST:3000")
    with Served(*arguments, *names, "--api-key", KEY) as served:
        served.wait_until_ready()
        yield served


def client(service: Served, path: str = "/v1"):
    # Imported late, here and below: it takes a second, which no collection should wait for.
    import openai

    return openai.OpenAI(base_url=service.url + path, api_key=KEY, max_retries=0)


def ask(
    service: Served, method: str, path: str, headers: dict[str, str], body: object = None
) -> http.client.HTTPResponse:
    """One request on a connection of its own, written as given."""
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=60)
    sent = None if body is None else json.dumps(body)
    typed = {} if body is None else {"content-type": "application/json"}
    connection.request(method, path, sent, {**typed, **headers})
    response = connection.getresponse()
    response.text = response.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return response


@pytest.mark.parametrize("path", ["/v1", "", "/", "/v1/", "//v1"])
def test_the_client_works_with_any_base_url_and_every_name(service: Served, path: str) -> None:
    import openai

    with client(service, path) as api:
        assert [model.id for model in api.models.list()] == ["chat", "org/name"]
        for name in ("chat", "org/name", "fake"):
            answer = api.chat.completions.create(model=name, messages=HI, max_tokens=2)
            assert answer.model == "chat"
            assert api.models.retrieve(name).id == name
        assert api.completions.create(model="chat", prompt="hi", max_tokens=1).choices
        with pytest.raises(openai.NotFoundError, match="'chat', 'org/name'"):
            api.models.retrieve("gpt-4o")


def test_an_answer_ends_with_length_where_the_room_ends_and_a_long_prompt_is_refused(
    service: Served,
) -> None:
    import openai

    with client(service) as api:
        room = api.models.retrieve("chat").max_model_len  # type: ignore[attr-defined]
        assert room == POOL_TOKENS + 1
        asked = {"model": "chat", "prompt": [65] * 90, "extra_body": {"ignore_eos": True}}
        for body in ({"max_tokens": 11}, {"max_tokens": 32_000, "n": 2}, {"max_tokens": 2**40}):
            answer = api.completions.create(**asked, **body)
            assert {choice.finish_reason for choice in answer.choices} == {"length"}
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 10 * len(answer.choices)
        stream = api.completions.create(**asked, max_tokens=500, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        for num_tokens in (100, 101, 9000):
            with pytest.raises(openai.BadRequestError, match="context length is 100 tokens") as e:
                api.completions.create(model="chat", prompt=[65] * num_tokens, max_tokens=5)
            assert e.value.code == "context_length_exceeded"
        long = [{"role": "user", "content": "x" * 100_000}]
        with pytest.raises(openai.BadRequestError, match="context length is 100 tokens") as e:
            api.chat.completions.create(model="chat", messages=long)  # type: ignore[arg-type]
        assert e.value.code == "context_length_exceeded"


def test_a_page_sends_a_preflight_and_reads_errors(service: Served) -> None:
    before = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    for path in ("/v1/chat/completions", "/chat/completions/"):
        allowed = ask(service, "OPTIONS", path, before)
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        keyless = ask(service, "POST", path, {"Origin": PAGE}, {"messages": HI})
        assert keyless.status == 401
        assert keyless.headers["access-control-allow-origin"] == PAGE
        with_key = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
        answer = ask(service, "POST", path, with_key, {"messages": HI, "max_tokens": 1})
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-dp-rank" in answer.headers["access-control-expose-headers"]
    for origin, path in (("http://evil.com", "/v1/models"), (PAGE, "/workers")):
        refused = ask(service, "OPTIONS", path, {**before, "Origin": origin})
        assert refused.status in (401, 403)
        assert refused.headers["access-control-allow-origin"] is None


def test_a_container_calls_it_by_the_name_that_it_has_for_this_machine(service: Served) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    for host, status in (("host.docker.internal:8000", 200), ("evil.com", 403)):
        assert ask(service, "GET", "/v1/models", {**key, "Host": host}).status == status
    page = {**key, "Host": "host.docker.internal", "Origin": "http://evil.com"}
    assert ask(service, "GET", "/v1/models", page).status == 403


def test_a_routers_rank_counts_before_its_clients(service: Served) -> None:
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=60)
    body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    for client_rank, router_rank in ((0, 1), (1, 0)):
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Authorization", f"Bearer {KEY}")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.putheader("X-Data-Parallel-Rank", str(client_rank))
        connection.putheader("X-data-parallel-rank", str(router_rank))
        connection.endheaders(body)
        response = connection.getresponse()
        response.read()
        assert (response.status, response.headers["x-dp-rank"]) == (200, str(router_rank))
    connection.close()


def test_a_strict_service_refuses_what_another_one_cuts() -> None:
    flags = ("--fake-pool-tokens", str(POOL_TOKENS), "--strict-max-tokens")
    with Served("--engine", "fake", *flags) as served:
        served.wait_until_ready()
        status, body = served.post("/v1/completions", {"prompt": [65] * 90, "max_tokens": 11})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert body["error"]["param"] == "max_tokens"
        assert served.post("/v1/completions", {"prompt": [65] * 90, "max_tokens": 10})[0] == 200
