"""The ``openai`` package against a real server: its parser accepts our responses.

The package is imported late: it takes a second, which no collection should wait for.
"""

import asyncio

import pytest

from mlx_dp.orchestrator.api import Ended, NewTokens
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.proto.messages.events import FinishReason
from tests.support.http.http_calls import HI
from tests.support.http.scripted_service import ScriptedService, granted, says
from tests.support.http.served_app import served

pytestmark = pytest.mark.system

OPTIONS = HttpOptions(served_model_name="demo", api_key="sk-key")
TEXT = "Paris, naturally é 😀."


async def client(port: int, key: str = "sk-key"):
    import openai

    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def test_client_streams_and_collects() -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: says(TEXT))
        async with asyncio.timeout(60), served(service, OPTIONS) as port, await client(port) as api:
            answer = await api.chat.completions.create(model="demo", messages=HI, n=2)
            assert [c.message.content for c in answer.choices] == [TEXT, TEXT]
            assert answer.usage.completion_tokens == 2 * (len(TEXT.encode()) + 1)

            stream = await api.chat.completions.create(
                model="demo", messages=HI, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
            assert chunks[-1].usage.completion_tokens == len(TEXT.encode()) + 1

            text = await api.completions.create(model="demo", prompt=["a", [98]], echo=True)
            assert [c.text for c in text.choices] == ["a" + TEXT, "b" + TEXT]
            assert [m.id async for m in api.models.list()] == ["demo"]

    asyncio.run(run())


def test_client_raises_the_matching_errors() -> None:
    import openai

    async def run() -> None:
        failed = Ended(reason=FinishReason.ERROR, message="worker 0 died", code="worker_lost")
        service = ScriptedService(lambda _: [granted(), NewTokens(ids=(65,)), failed])
        async with asyncio.timeout(60), served(service, OPTIONS) as port, await client(port) as api:
            create = api.chat.completions.create
            with pytest.raises(openai.InternalServerError, match="worker 0 died"):
                await create(model="demo", messages=HI)
            stream = await create(model="demo", messages=HI, stream=True)
            with pytest.raises(openai.APIError, match="worker 0 died"):
                [chunk async for chunk in stream]
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await create(model="demo", messages=HI, temperature=-1)
            with pytest.raises(openai.NotFoundError, match="gpt-4"):
                await create(model="gpt-4", messages=HI)
            service.refuse_from = 0
            with pytest.raises(openai.RateLimitError) as caught:
                await create(model="demo", messages=HI)
            assert caught.value.response.headers["retry-after"] == "3"
        async with served(service, OPTIONS) as port, await client(port, "wrong") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()

    asyncio.run(run())
