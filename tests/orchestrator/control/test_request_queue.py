"""The one queue and its lanes."""

from control_world import generation

from mlx_dp.orchestrator.control.ledger import Ledger, RequestEntry
from mlx_dp.orchestrator.control.request_queue import RequestQueue


def entries(*ranks: int | None) -> list[RequestEntry]:
    ledger = Ledger()
    return [ledger.open(generation(rank=rank), 0.0) for rank in ranks]


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


def test_what_comes_back_goes_to_the_front_whatever_the_limit() -> None:
    queue, waiting = filled(2, None, None)
    late = entries(None, None, None)[2]
    queue.put_back(late)
    queue.check()
    assert len(queue) == 3
    assert queue.heads() == [late]
    assert waiting[0] not in queue.heads()


def test_the_last_to_come_back_is_the_very_first_across_lanes() -> None:
    queue, _ = filled(9, None)
    first, second = entries(None, 1)[1], entries(*[None] * 5)[4]
    queue.put_back(second)
    queue.put_back(first)
    queue.check()
    assert queue.heads() == [first, second]


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
