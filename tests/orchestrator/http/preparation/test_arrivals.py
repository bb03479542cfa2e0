"""More simultaneous requests than there is room for."""

import asyncio
from collections import Counter

import httpx
import pytest

from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from tests.support.http.http_calls import CHAT, COMPLETIONS, HI
from tests.support.http.scripted_service import OPTIONS, STATE, ScriptedService

SLOTS = sum(owner.capacity.request_slots for owner in STATE.owners if owner.capacity)
FREE = SLOTS - sum(owner.running for owner in STATE.owners)
ROOM = FREE + STATE.max_queued_requests


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"})]
)
def test_requests_that_come_together_do_not_shut_out_one_another(path: str, body: dict) -> None:
    app = create_app(ScriptedService(), OPTIONS, FakeTextModel(512))

    async def arrive() -> Counter[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            calls = (client.post(path, json=body) for _ in range(3 * ROOM))
            return Counter(answer.status_code for answer in await asyncio.gather(*calls))

    statuses = asyncio.run(arrive())
    assert statuses[200] >= ROOM
    assert statuses[429] == 3 * ROOM - statuses[200] > 0
