"""A response stream between the controller and its reader."""

import asyncio
from dataclasses import dataclass, field

import pytest

from mlx_dp.orchestrator.api import Ended, Granted, NewTokens
from mlx_dp.orchestrator.control.requests.response_stream import BufferedStream
from mlx_dp.proto.messages.events import FinishReason, TokenLogprob

GRANTED = Granted(dp_rank=0, reason="round_robin")
ENDED = Ended(reason=FinishReason.STOP)


@dataclass
class Left:
    """The ids of cancelled requests."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    def cancel(self, request_id: int) -> None:
        self.calls.append(("cancel", request_id))

    def complete(self, request_id: int) -> None:
        self.calls.append(("complete", request_id))


def answer(left: Left | None = None) -> BufferedStream:
    return BufferedStream(7, left or Left())


def test_tokens_at_hand_are_joined_and_keep_their_place_among_events() -> None:
    made = answer()
    made.push(GRANTED)
    made.push_tokens((1,), (TokenLogprob(logprob=-1.0),))
    made.push_tokens((2, 3), (TokenLogprob(logprob=-2.0), TokenLogprob(logprob=-3.0)))
    made.push(GRANTED)
    made.push_tokens((4,), ())
    made.push(ENDED)

    async def read() -> list:
        return [event async for event in made]

    first, tokens, second, more, end = asyncio.run(read())
    assert first == second == GRANTED
    assert tokens.ids == (1, 2, 3)
    assert [each.logprob for each in tokens.logprobs] == [-1.0, -2.0, -3.0]
    assert more == NewTokens(ids=(4,))
    assert end == ENDED


def test_a_reader_is_woken_once_for_all_that_came_meanwhile() -> None:
    made = answer()
    events: list = []

    async def read() -> None:
        async for event in made:
            events.append(event)

    async def run() -> None:
        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        for token in range(100):
            made.push_tokens((token,), ())
        await asyncio.sleep(0)
        made.push(ENDED)
        await reader

    asyncio.run(run())
    assert events == [NewTokens(ids=tuple(range(100))), ENDED]


def test_a_reader_that_is_cancelled_can_be_replaced() -> None:
    made = answer()

    async def run() -> object:
        reader = asyncio.create_task(anext(made))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        made.push_tokens((1,), ())
        return await anext(made)

    assert asyncio.run(run()) == NewTokens(ids=(1,))


def test_nothing_follows_the_end() -> None:
    made = answer()
    made.push(ENDED)
    with pytest.raises(AssertionError):
        made.push(ENDED)
    with pytest.raises(AssertionError):
        made.push_tokens((1,), ())


def test_cancelling_an_ended_response_notifies_no_owner() -> None:
    left = Left()
    made = answer(left)
    made.cancel()
    made.complete()
    made.push(ENDED)
    made.cancel()
    made.complete()
    assert left.calls == [("cancel", 7), ("complete", 7)]
