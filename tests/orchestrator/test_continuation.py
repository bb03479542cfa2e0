"""Clients cannot see that an owner was lost: HTTP over a controller, at each token.

The worker dies at token k, for every k, and the response must be byte for byte that of a run
without a death: text, stop strings, log-probabilities, usage, one role, one id, one end.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest

from mlx_dp.orchestrator.control.controller import Controller
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from tests.support.control.control_world import World, serve_options
from tests.support.http.scripted_service import OPTIONS

QUICK = ControlLimits(tick_s=0.01, stop_grace_s=0.2, exit_settle_s=0.001)
NUM_TOKENS = 10
BODY = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": NUM_TOKENS,
    "seed": 3,
    "logprobs": True,
    "top_logprobs": 1,
}


def is_comment(event: str) -> bool:
    """A stream that moves names its new owner in one, which clients pass over."""
    return event.startswith(": x-dp-rank: ")


class Stage:
    """A service over fake workers. The one that has drawn token ``dies_at`` dies, once."""

    def __init__(self, dies_at: int | None) -> None:
        self.dies_at = dies_at
        self.world = World(limits=QUICK)
        self.controller = Controller(
            serve_options(), ControlPorts(self.world, self.world), limits=QUICK
        )
        self.greeted: set[str] = set()

    async def run_workers(self) -> None:
        while True:
            for worker in self.world.alive():
                if worker.identity not in self.greeted:
                    self.greeted.add(worker.identity)
                    worker.hello()
                worker.receive()
                if any(each.num_tokens == self.dies_at for each in worker.running.values()):
                    self.dies_at = None
                    worker.die(-9)
                    continue
                worker.run_once()
                worker.send_heartbeat()
            self.world.on_arrival()
            await asyncio.sleep(0.001)

    async def ask(self, body: dict[str, Any]) -> httpx.Response:
        turning = asyncio.create_task(self.run_workers())
        try:
            async with asyncio.timeout(20):
                await self.controller.start()
                while not all(o.status == "ready" for o in self.controller.state().owners):
                    await asyncio.sleep(0.001)
                app = create_app(self.controller, OPTIONS, FakeTextModel(97))
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                    return await client.post("/v1/chat/completions", json=body)
        finally:
            await self.controller.stop()
            turning.cancel()


def ask(body: dict[str, Any], dies_at: int | None = None) -> httpx.Response:
    stage = Stage(dies_at)
    response = asyncio.run(stage.ask(body))
    assert response.status_code == 200, response.text
    assert stage.dies_at is None, "no worker died"
    return response


def whole(body: dict[str, Any], dies_at: int | None = None) -> dict[str, Any]:
    answer: dict[str, Any] = ask(body, dies_at).json()
    return {"choices": answer["choices"], "usage": answer["usage"]}


def stream(body: dict[str, Any], dies_at: int | None = None) -> dict[str, Any]:
    """The whole answer as a reader of the stream puts it together."""
    response = ask(body | {"stream": True, "stream_options": {"include_usage": True}}, dies_at)
    *said, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), "nothing follows the end"
    events = [event for event in said if not is_comment(event)]
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert [delta.get("role") for delta in deltas].count("assistant") == 1
    reasons = [reason for c in chunks if (reason := c["choices"][0]["finish_reason"])]
    assert len(reasons) == 1
    logprobs = [c["choices"][0]["logprobs"] for c in chunks]
    return {
        "text": "".join(delta.get("content") or "" for delta in deltas),
        "logprobs": [token for each in logprobs if each for token in each["content"]],
        "reason": reasons[0],
        "usage": last["usage"],
    }


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return stream(BODY)


@pytest.mark.parametrize("dies_at", range(NUM_TOKENS))
def test_a_stream_goes_on_from_any_token_and_looks_the_same(
    dies_at: int, undisturbed: dict[str, Any]
) -> None:
    continued = stream(BODY, dies_at)
    assert continued == undisturbed
    assert continued["usage"]["completion_tokens"] == NUM_TOKENS
    assert len(continued["logprobs"]) == NUM_TOKENS, "one for each token, and none twice"
    assert continued["reason"] == "length"


@pytest.mark.parametrize("dies_at", [0, 4, NUM_TOKENS - 1])
def test_an_answer_that_is_not_streamed_is_the_same_too(dies_at: int) -> None:
    assert whole(BODY, dies_at) == whole(BODY)


@pytest.mark.parametrize("dies_at", [3, 4, 5])
def test_a_stop_string_is_found_where_it_spans_two_owners(
    dies_at: int, undisturbed: dict[str, Any]
) -> None:
    text = undisturbed["text"]
    body = BODY | {"stop": [text[3:6]]}
    continued = stream(body, dies_at)
    assert continued == stream(body)
    assert continued["text"] == text[:3]
    assert continued["reason"] == "stop"
    assert continued["usage"]["completion_tokens"] == 6
