"""The one queue and its lanes."""

from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.control.state.request_queue import RequestQueue
from tests.support.control.fake_worker import generation


def entries(*ranks: int | None) -> list[RequestEntry]:
    return [
        RequestEntry(request_id=index, generation=generation(rank=rank), queued_at=0.0)
        for index, rank in enumerate(ranks)
    ]


def filled(limit: int, *ranks: int | None) -> tuple[RequestQueue, list[RequestEntry]]:
    queue, waiting = RequestQueue(limit), entries(*ranks)
    for entry in waiting:
        queue.put(entry)
    queue.check()
    return queue, waiting


def test_it_is_full_at_its_limit() -> None:
    queue, waiting = filled(2, None)
    assert not queue.full
    queue, waiting = filled(2, None, 1)
    assert queue.full
    queue.remove(waiting[0])
    assert not queue.full


def test_heads_are_the_first_of_each_lane_in_order_of_arrival() -> None:
    queue, waiting = filled(9, 1, None, 1, 0, None)
    assert queue.heads() == [waiting[0], waiting[1], waiting[3]]


def test_leaving_from_the_middle_keeps_the_order() -> None:
    queue, waiting = filled(9, None, None, None)
    queue.remove(waiting[1])
    queue.check()
    assert queue.heads() == [waiting[0]]
    queue.remove(waiting[0])
    assert queue.heads() == [waiting[2]]


def test_what_comes_back_goes_before_all_that_are_younger_whatever_the_limit() -> None:
    oldest, old, *younger = entries(None, None, None, None)
    queue = RequestQueue(2)
    for entry in younger:
        queue.put(entry)
    for back in (old, oldest):
        queue.put_back(back)
        queue.check()
        assert queue.heads() == [back]
    assert len(queue) == 4


def test_what_comes_back_does_not_overtake_an_older_one_in_any_lane() -> None:
    pinned, oldest, old, back = entries(1, None, None, None)
    queue = RequestQueue(9)
    for entry in (pinned, oldest, old):
        queue.put(entry)
    queue.put_back(back)
    queue.check()
    assert queue.heads() == [pinned, oldest]
    left = []
    while len(queue):
        left.append(queue.heads()[0])
        queue.remove(left[-1])
    assert left == [pinned, oldest, old, back]


def test_a_request_whose_rank_no_longer_binds_still_leaves_its_lane() -> None:
    queue, waiting = filled(9, 1)
    waiting[0].emitted.append(5)
    queue.remove(waiting[0])
    queue.check()
    assert len(queue) == 0


def test_it_knows_the_tokens_that_wait() -> None:
    queue, waiting = filled(9, None, 0)
    assert queue.num_tokens == 6
    queue.remove(waiting[1])
    assert queue.num_tokens == 3
