"""Refusals before any work is done, as a function of the present loads."""

from dataclasses import replace

import pytest

from mlx_dp.orchestrator.api import ServiceState, ServiceStatus, WorkerStatus
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.http.preparation.prechecks import refuse_overload, vocab_size
from mlx_dp.orchestrator.http.stream.queue_pace import QueueLoad
from mlx_dp.proto.capacity.model_shape import ModelShape
from tests.support.http.scripted_service import STATE

SLOTS = 16
"""Of both owners together; the queue holds as many."""


def never_asked(_: QueueLoad) -> int:
    raise AssertionError("only a full queue has a pace")


def admits(state: ServiceState, *, preparing: int = 0, choices: int = 1) -> bool:
    try:
        refuse_overload(state, preparing=preparing, choices=choices, retry_after_s=lambda _: 7)
    except ApiError as error:
        if error.status != 429:
            raise
        return False
    return True


def test_queue_takes_as_many_as_it_holds() -> None:
    assert admits(replace(STATE, queued_requests=15))
    assert not admits(replace(STATE, queued_requests=16))
    assert admits(replace(STATE, queued_requests=13), choices=3)
    assert not admits(replace(STATE, queued_requests=14), choices=3)


BUSY = replace(STATE, owners=tuple(replace(owner, running=8) for owner in STATE.owners))


def refused(
    state: ServiceState, *, preparing: int = 0, choices: int = 1
) -> tuple[ApiError, list[QueueLoad]]:
    """The refusal, and the loads with which the pace was computed."""
    loads: list[QueueLoad] = []

    def retry_after_s(load: QueueLoad) -> int:
        loads.append(load)
        return 7

    with pytest.raises(ApiError) as caught:
        refuse_overload(state, preparing=preparing, choices=choices, retry_after_s=retry_after_s)
    assert caught.value.status == 429
    return caught.value, loads


def test_a_full_queue_says_when_to_come_back() -> None:
    error, loads = refused(replace(BUSY, queued_requests=16))
    assert error.headers["retry-after"] == "7"
    assert loads == [QueueLoad(serving=16, places=16)]


def test_a_full_queue_counts_what_is_there_and_what_is_being_prepared() -> None:
    one = replace(BUSY, max_queued_requests=1)
    error, _ = refused(one, preparing=1)
    assert str(error) == "the queue is full: 0 of 1 requests queued, 1 being prepared"
    error, _ = refused(replace(BUSY, queued_requests=14), choices=3)
    assert str(error) == (
        "the queue is full: 14 of 16 requests queued, 0 being prepared, and this request asks for "
        "3 answers"
    )


def test_requests_that_prepare_will_take_the_slots_that_are_free() -> None:
    busier = replace(STATE, owners=(replace(STATE.owners[0], running=5), STATE.owners[1]))
    error, loads = refused(busier, preparing=40)
    assert str(error) == (
        "the queue is full: 0 of 16 requests queued, 40 being prepared for 11 free slots"
    )
    assert loads == [QueueLoad(serving=16, places=16)]


def test_requests_that_prepare_are_counted_beyond_the_free_slots() -> None:
    assert admits(STATE, preparing=SLOTS + 15)
    assert not admits(STATE, preparing=SLOTS + 16)
    busy = replace(STATE, owners=tuple(replace(o, running=8) for o in STATE.owners))
    assert admits(busy, preparing=15)
    assert not admits(busy, preparing=16)
    lost = replace(STATE, owners=tuple(replace(o, status=WorkerStatus.LOST) for o in STATE.owners))
    assert not admits(lost, preparing=16)


def test_many_answers_may_fill_free_slots_beyond_the_queue() -> None:
    short = replace(STATE, max_queued_requests=4)
    assert admits(short, choices=SLOTS + 4)
    busy = replace(short, owners=tuple(replace(o, running=8) for o in short.owners))
    assert not admits(busy, choices=5)


def test_more_answers_than_can_ever_be_taken_are_the_clients_error() -> None:
    short = replace(STATE, max_queued_requests=4)
    with pytest.raises(ApiError, match="21 answers, but 16 can run at once and 4 wait") as caught:
        refuse_overload(
            short, preparing=0, choices=SLOTS + 5, param="prompt", retry_after_s=never_asked
        )
    assert caught.value.status == 400
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("status", [ServiceStatus.DRAINING, ServiceStatus.STARTING])
def test_a_service_that_is_not_ready_says_so(status: ServiceStatus) -> None:
    with pytest.raises(ApiError, match=f"the service is {status.value}") as caught:
        refuse_overload(replace(STATE, status=status), preparing=0, retry_after_s=never_asked)
    assert caught.value.status == 503


def test_queue_of_no_length_still_serves_one_at_a_time() -> None:
    assert admits(replace(STATE, max_queued_requests=0))


@pytest.mark.parametrize(("sizes", "expected"), [((), 512), ((100, 90), 90)])
def test_vocabulary_is_the_models_once_it_is_loaded(sizes: tuple[int, ...], expected: int) -> None:
    shape = ModelShape(
        num_layers=1,
        attention_layers=1,
        auxiliary_layers=0,
        kv_bytes_per_token=1,
        auxiliary_bytes_per_slot=0,
        vocab_size=1,
        context_length=1,
        weights_nbytes=1,
    )
    owners = tuple(
        replace(STATE.owners[0], shape=replace(shape, vocab_size=size)) for size in sizes
    )
    assert vocab_size(replace(STATE, owners=owners), 512) == expected
