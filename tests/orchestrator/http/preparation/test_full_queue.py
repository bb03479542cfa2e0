"""The refusal that a client gets from a full queue, through the routes."""

from dataclasses import replace

import httpx
import pytest

from mlx_dp.orchestrator.http.stream.queue_pace import QueuePace
from mlx_dp.orchestrator.service_counters import RequestObserver
from tests.support.control.request_timings import timings
from tests.support.http.http_calls import CHAT, COMPLETIONS, HI, call, error
from tests.support.http.scripted_service import STATE, ScriptedService

BUSY = tuple(replace(owner, running=8) for owner in STATE.owners)


class Paced(ScriptedService):
    """Each of its requests took this long, as it reports to its observers."""

    def __init__(self, *, each_s: float, **state: object) -> None:
        super().__init__(lambda _: [], owners=BUSY)
        self.each_s = each_s
        self.current = replace(self.current, **state)

    def observe(self, observer: RequestObserver) -> None:
        super().observe(observer)
        for _ in range(4):
            observer.ended(timings(ended_s=self.each_s))


def ask(service: ScriptedService, **fields: object) -> httpx.Response:
    return call(service, "POST", CHAT, json={"messages": HI, **fields})


@pytest.mark.parametrize(("each_s", "told"), [(1.3, "1"), (64.0, "4")])
def test_the_answer_follows_the_pace_of_all_owners(each_s: float, told: str) -> None:
    response = ask(Paced(each_s=each_s, queued_requests=1, max_queued_requests=1))
    assert error(response, 429)["message"] == (
        "the queue is full: 1 of 1 requests queued, 0 being prepared"
    )
    assert response.headers["retry-after"] == told


def test_a_queue_that_turns_out_to_be_full_follows_the_pace_too() -> None:
    service = Paced(each_s=64.0)
    service.refuse_from = 0
    for stream in (False, True):
        response = ask(service, stream=stream)
        error(response, 429)
        assert response.headers["retry-after"] == "4"


@pytest.mark.parametrize(
    ("queued", "running", "idle"), [(0, 0, True), (1, 0, False), (0, 1, False)]
)
def test_a_request_that_finds_no_other_ends_the_silence(
    monkeypatch: pytest.MonkeyPatch, queued: int, running: int, idle: bool
) -> None:
    seen: list[QueuePace] = []
    monkeypatch.setattr(QueuePace, "note_idle", lambda pace: seen.append(pace))
    owners = (replace(STATE.owners[0], running=running), STATE.owners[1])
    service = ScriptedService(owners=owners)
    service.current = replace(service.current, queued_requests=queued)
    assert call(service, "POST", COMPLETIONS, json={"prompt": "hi"}).is_success
    assert bool(seen) is idle
