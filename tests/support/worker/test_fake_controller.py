"""The fake controller accepts only the events that the protocol allows."""

import pytest

from mlx_dp.proto.messages.commands import Abort, Flush
from mlx_dp.proto.messages.events import (
    Accepted,
    Finished,
    FinishReason,
    Flushed,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    TokenChunk,
    Tokens,
    Up,
)
from tests.support.worker.fake_controller import FakeController, Request
from tests.support.worker.worker_bench import submit

ACCEPTED = Accepted(request_id=1, epoch=1, slot=0)
PREFILLED = Prefilled(request_id=1, epoch=1, cached_tokens=0)
TOKEN = Tokens(chunks=(TokenChunk(request_id=1, epoch=1, index=0, ids=(5,)),))
REJECTED = Rejected(request_id=1, epoch=1, reason=RejectReason.NO_TOKENS, message="")
FLUSHED = Flushed(flush_id=7, num_tokens=0, nbytes=0)


def finished(reason: FinishReason, count: int = 0) -> Finished:
    return Finished(request_id=1, epoch=1, reason=reason, num_tokens=count)


@pytest.fixture
def back() -> list[Request]:
    return []


@pytest.fixture
def controller(back: list[Request]) -> FakeController:
    """It has granted one request of three tokens."""
    made = FakeController(lambda request, _: back.append(request))
    made.sent(submit(1, max_tokens=3))
    return made


def told(controller: FakeController, *messages: Up) -> None:
    for message in messages:
        controller.receive(message)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        pytest.param([], PREFILLED, id="Prefilled before Accepted"),
        pytest.param([ACCEPTED], ACCEPTED, id="accepted twice"),
        pytest.param([ACCEPTED], REJECTED, id="rejected after Accepted"),
        pytest.param([ACCEPTED], TOKEN, id="tokens before Prefilled"),
        pytest.param([ACCEPTED, PREFILLED, TOKEN], TOKEN, id="the same token twice"),
        pytest.param([ACCEPTED], finished(FinishReason.ABORT), id="aborted unasked"),
        pytest.param([ACCEPTED], finished(FinishReason.ERROR), id="an error that none expects"),
        pytest.param([ACCEPTED], finished(FinishReason.LENGTH), id="ended before its length"),
        pytest.param([REJECTED], ACCEPTED, id="accepted after it was given back"),
        pytest.param([], FLUSHED, id="flushed unasked"),
    ],
)
def test_what_cannot_be_is_not_believed(
    controller: FakeController, before: list[Up], message: Up
) -> None:
    told(controller, *before)
    with pytest.raises(AssertionError):
        controller.receive(message)


def test_an_abort_of_an_earlier_grant_does_not_end_a_later_one(
    controller: FakeController, back: list[Request]
) -> None:
    controller.sent(Abort(request_id=1, epoch=1))
    told(controller, ACCEPTED, Preempted(request_id=1, epoch=1, num_tokens=0))
    controller.grant(back[0])
    told(controller, Accepted(request_id=1, epoch=2, slot=0))
    with pytest.raises(AssertionError):
        controller.receive(Finished(request_id=1, epoch=2, reason=FinishReason.ABORT, num_tokens=0))


def test_a_request_goes_on_behind_what_it_had(
    controller: FakeController, back: list[Request]
) -> None:
    told(controller, ACCEPTED, PREFILLED, TOKEN)
    told(controller, Preempted(request_id=1, epoch=1, num_tokens=1))
    again = controller.grant(back[0])
    assert (again.epoch, again.output_ids) == (2, (5,))


def test_a_flush_is_answered_by_its_own_id(controller: FakeController) -> None:
    controller.sent(Flush(flush_id=7))
    controller.receive(FLUSHED)
    assert controller.flushed == FLUSHED
